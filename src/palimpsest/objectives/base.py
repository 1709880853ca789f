"""One objective for every method.

With f_s(x) = ∇_θ φ_s(θ_s, x, y) for each *slot* s (a tangent point, an output, or both),

    r = T − Σ_i Σ_s λ_is f_s(x_i)          residual
    L = Σ_p w_p ‖r_p‖²                     loss over the named parameters p

A method may have several targets T_j, each with its own tangent points and multipliers. They share the images; see
:mod:`palimpsest.objectives.segments`.

No f is ever stored. The represented vector v = Σ λ f is one backward pass. A second pass, the adjoint of (x, λ) ↦ v,
gives both gradients at once:

    ∂L/∂λ_is = −2 g_is,   ∂L/∂x_i = −2 ∇_x Σ_s λ_is g_is,   g_is = ⟨w∘r, f_s(x_i)⟩.

A third pass gives the splitting matrix S(x_i) = −2 ∇²_x Σ_s λ_is g_is, with r held fixed, for all Lanczos products. A
method may relate L to v in another way; the pull −½ ∂L/∂v then takes the place of w∘r. So it does with whitening, which
measures r by another norm; see :mod:`palimpsest.objectives.norm`.

:mod:`palimpsest.objectives.binding` checks the arguments and chooses the engine: `dense` for stacks of dense layers,
`autograd` for any other network. Candidates may be taken in chunks: v adds up over them, and given r each chunk's
gradients are its own. In the same way they may be shared among processes, which add up v by one all-reduce.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.execution.processes import Processes
from palimpsest.objectives import autograd, binding, dense, reduced, weighting
from palimpsest.objectives.autograd import Network, Operator, Parameters, Sharpness
from palimpsest.objectives.binding import Bound, parameters_of
from palimpsest.objectives.labels import Labels, Unlabelled
from palimpsest.objectives.norm import Norm
from palimpsest.objectives.segments import Segments
from palimpsest.objectives.spaces import Parametrisation, Subspace
from palimpsest.objectives.whitening import Metric, metrics

ONE_BATCH = "candidates that share live batch normalisation do not split; leave splitting out"
Layers = tuple[dense.Layer, ...] | None
Points = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]


class Objective(ABC):
    """The loss of a method and its derivatives. Subclass it to add a method.

        L(x, λ) = Σ_p w_p ‖T_p − Σ_i λ_i f_p(x_i)‖²,   f(x) = ∇_θ φ(θ, x, y)

    A subclass states its target, its tangent points and three members: `scalar`, `signed` and `label_kind`.

    Args:
        model: the network. It is copied and put in evaluation mode.
        target: T, keyed like ``model.named_parameters()``. Only these parameters take part. None is the trained θ. A
            list holds the targets T_j of several segments, all of the same parameters.
        tangents: the point at which f is taken, or several, each with its own multipliers. None is the trained θ. With
            a list of targets, a list of as many of these. A point may also hold buffers, which the network uses there.
        sharpness: β of the softplus that replaces every ReLU. None keeps the ReLUs.
        weights: the weight w_p of each parameter in the loss, by name. Parameters that are not named count 1.
            ``"auto"`` lowers the weight of parameters that training images explain badly. ``"likelihood"`` does so at
            every step, by the present residual; it is for one target. See `palimpsest.objectives.weighting`.
        initial: the initial weights, a state dict, if known. Only ``weights="auto"`` uses them.

    Examples:
        >>> from palimpsest.networks import MLP
        >>> from palimpsest.methods import KKT
        >>> objective = KKT(MLP(4, hidden=(8,)), signed=True)
        >>> residual = objective.residual(torch.randn(3, 4), torch.zeros(3))
        >>> sorted(residual) == sorted(objective.target)
        True
    """

    signed: bool = True  # whether multipliers may be negative; if not, the solver keeps them at or above zero
    linear: bool = False  # whether φ(Φ) = cΦ if the network has one output
    label_kind: Labels = Unlabelled()  # the labels that candidates carry
    exact_forward: bool = False  # whether ReLUs keep their values, and only their derivatives are smoothed
    whitening: float = 0.0  # how far the directions of a layer's change count alike in a search: 1 means fully
    apart: bool = False  # whether v keeps the parts of its tangent points, on its first axis, instead of their sums
    scaled: bool = True  # whether L depends on the scale of the multipliers
    live: bool = False  # whether the candidates are one batch, whose statistics normalise each of them

    @torch.inference_mode(False)  # the copies can then be differentiated, in whatever mode the caller is
    def __init__(
        self,
        model: nn.Module,
        *,
        target: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
        tangents: Points | Sequence[Points] | None = None,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        target = parameters_of(model) if target is None else target
        tangents = parameters_of(model) if tangents is None else tangents
        one = isinstance(target, Mapping)
        targets = [target] if isinstance(target, Mapping) else list(target)
        groups = cast("list[Points]", [tangents] if one else list(tangents))
        self._several_tangents = not isinstance(groups[0], Mapping)
        points = [[group] if isinstance(group, Mapping) else list(group) for group in groups]
        binding.check_weights(model, targets, [θ for group in points for θ in group])
        self.segments = Segments(None) if one else Segments.of(targets)
        self.target: Parameters = self.segments.joined([_copied(T) for T in targets])
        self.tangents: list[Parameters] = [_copied(θ) for group in points for θ in group]
        self.initial = None if initial is None else binding.matching(initial, self.target)
        self.sharpness: Sharpness = sharpness
        self.chunk: int | None = None
        self._processes = Processes()
        self._space: Parametrisation | None = None
        self._metrics: dict[str, Metric] = {}
        self._may_be_dense = True
        self._bound: Bound | None = None  # dropped by every copy, see `_changed`
        self.weights = self._resolved(weights)
        self._network = Network(copy.deepcopy(model).eval().requires_grad_(False))

    def _resolved(self, weights: weighting.Weights) -> dict[str, float] | weighting.Likelihood:
        if weights == "likelihood":
            if self.segments.lengths is not None:
                raise InvalidInputError("weights='likelihood' is for one target; give 'auto' or numbers by name")
            return weighting.Likelihood.of(self.target)
        energy = {name: float(self.segments.square(t.double())) for name, t in self.target.items()}
        return weighting.resolve(weights, energy, self.unexplained)

    @abstractmethod
    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """φ of each candidate from the network's outputs (k, C): shape (k,), or (k, C) for one per output."""

    def unexplained(self) -> dict[str, float]:
        """v_p, for automatic weights: the mean square of the part of T_p that no training image explains."""
        return weighting.remnants(self.target, self.initial)

    # --- the loss and its derivatives ------------------------------------------------------------

    def represent(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Parameters:
        """v = Σ_i Σ_s λ_is f_s(x_i): the part of the target that the candidates explain, by one backward pass."""
        bound = self.bind(x, multipliers, labels)
        if x.requires_grad or multipliers.requires_grad:
            return self._represent(x, multipliers, labels)
        return self._processes.total(self.explained(bound.layers, *self.mine(x, multipliers, labels)))

    def residual(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Parameters:
        """r = T − v, keyed by parameter name."""
        return self._residual(self.represent(x, multipliers, labels))

    def pull(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Parameters:
        """−½ ∂L/∂v, shaped like v: w∘r, unless the method says otherwise."""
        return self._pull(self.represent(x.detach(), multipliers.detach(), labels))

    def loss(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Tensor:
        """L = Σ_p w_p ‖r_p‖², not averaged over candidates or parameters."""
        return self.norm_squared(self.residual(x, multipliers, labels))

    def gradients(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(∂L/∂x, ∂L/∂λ)."""
        return self.loss_and_gradients(x, multipliers, labels)[1:]

    def loss_and_gradients(
        self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(L, ∂L/∂x, ∂L/∂λ)."""
        bound = self.bind(x, multipliers, labels)
        e, *halves = self.error_and_half_gradients(bound, *self.mine(x, multipliers, labels))
        dx, dλ = (2 * self.joined(half, len(x)) for half in halves)
        return self.norm_squared(e), dx, dλ

    def error_and_half_gradients(
        self, bound: Bound, x: Tensor, multipliers: Tensor, labels: Tensor | None
    ) -> tuple[Parameters, Tensor, Tensor]:
        """(e = v − T, ½∂L/∂x, ½∂L/∂λ) without any check. The solver calls it at every step, and scales them at once.

        The candidates are those of this process. The adjoint of (x, λ) ↦ v, applied to w∘e = −w∘r, gives both
        derivatives.
        """
        chunks = self.chunks(x.detach(), multipliers.detach(), labels)
        if len(chunks) == 1:
            v, adjoint = self._linearise(bound.layers, *chunks[0])
            e, u = self._error_and_pull(self._processes.total(v))
            half_dx, half_dλ = adjoint(u)
            return e, half_dx, half_dλ
        e, u = self._error_and_pull(self._processes.total(self.explained(bound.layers, x, multipliers, labels)))
        parts = [self._linearise(bound.layers, *chunk)[1](u) for chunk in chunks]
        half_dx, half_dλ = map(torch.cat, zip(*parts, strict=True))
        return e, half_dx, half_dλ

    def curvature(
        self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None, *, pull: Parameters | None = None
    ) -> Operator:
        """The operator v ↦ (S(x_1) v_1, …, S(x_k) v_k), with S(x_i) = −2 ∇²_x Σ_s λ_is g_is at a fixed residual.

        ``pull`` is that of all candidates, if these are not all.
        """
        if self.live:
            raise InvalidInputError(ONE_BATCH)
        u = pull or self.pull(x, multipliers, labels)
        x = autograd.leaf(x)
        v = self.represent(x, multipliers.detach(), labels)
        (λ_grad_g,) = autograd.adjoint(v, (x,), u, differentiable=True)
        return autograd.directional(-2 * λ_grad_g, x)

    def hessian(self, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Operator:
        """The operator v ↦ ∇²_x L · v over all candidates jointly: S plus the coupling 2 J_iᵀJ_j between them."""
        if self._processes.count > 1 or len(self.chunks(x, multipliers, labels)) > 1:
            return self._hessian_in_chunks(x, multipliers, labels)
        x = autograd.leaf(x)
        loss = self.loss(x, multipliers.detach(), labels)
        if not loss.requires_grad:  # no trained parameter depends on the candidates
            return torch.zeros_like
        (dx,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
        return autograd.directional(dx, x)

    def _hessian_in_chunks(self, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Operator:
        """v ↦ S v + 2 JᵀW(Jv). No graph outlives a chunk, so each product is computed from the start."""
        x, λ = x.detach(), multipliers.detach()
        layers, v = self.bind(x, λ, labels).layers, self.represent(x, λ, labels)
        u = self._pull(v)
        chunks = self.chunks(*self.mine(x, λ, labels))

        def product(direction: Tensor) -> Tensor:
            parts = list(zip(chunks, self._processes.mine(direction).split(len(chunks[0][0])), strict=True))
            Jv = _total(autograd.pushed(self._represent, chunk, part) for chunk, part in parts)
            Jv = self._pull_change(v, self._processes.total(Jv))
            rows = [
                self.curvature(*chunk, pull=u)(part) + 2 * self._linearise(layers, *chunk)[1](Jv)[0]
                for chunk, part in parts
            ]
            return self.joined(torch.cat(rows), len(x))

        return product

    @property
    def target_norm_squared(self) -> Tensor:
        """Σ_p w_p ‖T_p‖²: the loss without candidates. Reported losses are relative to it."""
        return self.norm_squared(self.target)

    @property
    def convex(self) -> bool:
        """Whether L is convex in r, so that min_i λ_min(S(x_i)) bounds λ_min(∇²_x L) from below."""
        return not isinstance(self.weights, weighting.Likelihood)

    def norm_squared(self, r: Parameters) -> Tensor:
        """Σ_p w_p ‖r_p‖², or the mean over several targets of this relative to each ‖T_j‖²."""
        return self._norm.squared(r)

    def length_squared(self, v: Parameters) -> Tensor:
        """The size of something that candidates explain, on the scale of the target."""
        return self.norm_squared(v)

    @property
    def _norm(self) -> Norm:
        return Norm(self.weights, self.segments, self._metrics)

    # --- the pieces ------------------------------------------------------------------------------

    def _φ(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        φ = self.scalar(outputs, labels)
        binding.check_scalar(self, φ, outputs)
        return φ.squeeze(1) if φ.ndim == 2 and φ.shape[1] == 1 else φ

    def _φ_at(self, x: Tensor, labels: Tensor | None, θ: Parameters) -> Tensor:
        return self._φ(self._network(θ, self._images(x), self.sharpness), labels)

    @torch.enable_grad()  # whoever asks: the multipliers of each point are parts of all, and keep their graph
    def _nodes(self, multipliers: Tensor) -> list[list[tuple[Parameters, Tensor]]]:
        """(θ_s, λ_s) for each tangent point, in groups that v adds up: those of each target, or each alone."""
        λs = multipliers.unbind(1) if self.segments.shape else (multipliers,)
        points = iter(self.tangents)
        nodes = [[(next(points), λ_s) for λ_s in (λ.unbind(1) if self._several_tangents else (λ,))] for λ in λs]
        return [[node] for group in nodes for node in group] if self.apart else nodes

    def _represent(self, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Parameters:
        """v by autograd, with a graph if x or λ asks for derivatives."""
        φ = partial(self._φ_at, x, labels)
        differentiable = x.requires_grad or multipliers.requires_grad
        with torch.enable_grad():
            parts = [autograd.represent(φ, list(self.target), nodes, differentiable=differentiable)
                     for nodes in self._nodes(multipliers)]  # fmt: skip
            return self.segments.joined(parts)

    def _linearise(
        self, layers: Layers, x: Tensor, multipliers: Tensor, labels: Tensor | None
    ) -> tuple[Parameters, dense.Adjoint]:
        """v, and the map u ↦ (∇_x Σ_s λ_s ⟨u, f_s⟩, ⟨u, f_s⟩), for candidates that fit into memory together."""
        if layers is None:
            x, λ = autograd.leaf(x), autograd.leaf(multipliers)
            v = self._represent(x, λ, labels)
            return _copied(v), partial(autograd.adjoint, v, (x, λ))
        images, φ = self._images(x), partial(self._φ, labels=labels)
        engine = partial(dense.linearise, layers, exact_forward=self.exact_forward, linear=self.linear)
        groups = self._nodes(multipliers)
        axes = [len(groups)] if self.segments.shape else []
        v = {name: t.new_empty((*axes, *t.shape[len(axes) :])) for name, t in self.target.items()}
        targets = zip(groups, self.segments.divided(v), strict=True)
        adjoints = [engine(nodes, φ, images.flatten(1), self.sharpness, into=v_j) for nodes, v_j in targets]

        def pulled_back(u: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            pairs = [adjoint(u_j) for adjoint, u_j in zip(adjoints, self.segments.divided(u), strict=True)]
            d_images = autograd.total([d for d, _ in pairs]).view_as(images)
            g = pairs[0][1] if len(pairs) == 1 else torch.stack([g for _, g in pairs], 1)
            return d_images if self._space is None else self._space.pulled_back(d_images), g.view_as(multipliers)

        return v, pulled_back

    def explained(self, layers: Layers, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Parameters:
        """v of these candidates without a graph and without any check, added up over the chunks."""
        chunks = self.chunks(x.detach(), multipliers.detach(), labels)
        return _total(self._represent(*c) if layers is None else self._linearise(layers, *c)[0] for c in chunks)

    def _residual(self, v: Parameters) -> Parameters:
        """r = T − v."""
        return {name: t - v[name] for name, t in self.target.items()}

    def _error_and_pull(self, v: Parameters) -> tuple[Parameters, Parameters]:
        """e = −r, in the memory of v to save a pass over memory, and ½ ∂L/∂v = w∘e."""
        e = {name: v[name] for name in self.target}
        torch._foreach_sub_(list(e.values()), list(self.target.values()))  # in one kernel
        return e, self._norm.half_gradient(e)

    def _pull(self, v: Parameters) -> Parameters:
        """−½ ∂L/∂v. Gradients of autograd may share memory, so v is copied."""
        return {name: -u for name, u in self._error_and_pull(_copied(v))[1].items()}

    def _pull_change(self, v: Parameters, change: Parameters) -> Parameters:
        """The derivative of v ↦ ½ ∂L/∂v along a change of v."""
        return self._norm.half_curvature(self._residual(v), change)

    # --- candidates: their space, outputs, multipliers and chunks -----------------------------------

    def _images(self, x: Tensor) -> Tensor:
        return x if self._space is None else self._space.images(x)

    def outputs(self, x: Tensor) -> Tensor:
        """The (smoothed) network's outputs (k, C) at the first tangent point."""
        return self._network(self.tangents[0], self._images(x), self.sharpness)

    def multiplier_shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of one candidate's multipliers: an axis each for several targets, tangent points and outputs."""
        outputs = self.outputs(x[:1])
        labels = self.label_kind.balanced(1, outputs.shape[1])
        slots = tuple(self._φ(outputs, None if labels is None else labels.to(x.device)).shape[1:])
        nodes = (len(self.tangents) // len(self.segments.shares),) if self._several_tangents else ()
        return (*self.segments.shape, *nodes, *slots)

    def chunks(
        self, x: Tensor, multipliers: Tensor, labels: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The candidates in groups of at most ``chunk``, all in one by default and if they are one batch."""
        size = len(x) if self.live else self.chunk or len(x)
        groups = [slice(start, start + size) for start in range(0, len(x), size)]
        return [(x[i], multipliers[i], None if labels is None else labels[i]) for i in groups]

    def mine(self, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The candidates of this process among all."""
        mine = self._processes.mine
        return mine(x), mine(multipliers), None if labels is None else mine(labels)

    def joined(self, mine: Tensor, k: int) -> Tensor:
        """The values of all k candidates from those of each process."""
        return self._processes.joined(mine, k)

    def bind(self, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Bound:
        """Raise a named error unless the arguments fit the network; choose the engine when their shapes are new."""
        self._bound = bound = binding.bind(self, x, multipliers, labels, self._bound)
        return bound

    def check_network(self, x: Tensor) -> None:
        """Raise a named error unless the network can be differentiated as the method needs, at such candidates."""
        self._network.check(self._images(x), self.sharpness)

    def dense_layers(self, x: Tensor) -> Layers:
        """The layers, if the network is a stack of dense ones and all of them take part."""
        layers = self._network.dense_layers(self._images(x)) if self._may_be_dense and not self.live else None
        names = {name for layer in layers or () for name in (layer.weight, layer.bias) if name}
        return layers if names == set(self.target) else None

    # --- the same objective elsewhere --------------------------------------------------------------

    def within(self, space: Parametrisation) -> Self:
        """The same objective in other coordinates, c ↦ L(x(c)): every derivative is then one in c.

        Dense layers in a subspace become a smaller network; see :mod:`palimpsest.objectives.reduced`. Whitening takes
        effect here: the loss is then in its metric.
        """
        if self._space is not None:
            raise InvalidInputError("this objective lives in coordinates already; start from the one it was made of")
        space = space.to(self.device, self.dtype)
        if isinstance(space, Subspace) and self.scaled:  # Adam works on entries, which a subspace mixes
            self.check_network(space.offset[None])
            if layers := self.dense_layers(space.offset[None]):
                known = (self.target, self.tangents, self.weights, self.whitening, self.segments.shares)
                network, space, target, tangents, weights = reduced.reduce(layers, space, *known)
                parts = {"target": target, "tangents": tangents, "weights": weights}
                smaller = Network(network, exact_forward=self.exact_forward)
                return self._changed(_network=smaller, _space=space, **parts)
        if self.whitening and not self.scaled:
            raise InvalidInputError("a training by Adam is read without whitening; leave it out")
        return self._changed(_space=space, _metrics=self._whitening_metrics())

    def _whitening_metrics(self) -> dict[str, Metric]:
        several, p = bool(self.segments.shape), self.whitening
        return metrics(self.target, self.segments.shares, several=several, p=p) if p else {}

    @torch.inference_mode(False)
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same objective on another device or in another precision."""
        return self._changed(
            _space=None if self._space is None else self._space.to(device, dtype),
            _metrics={name: metric.to(device, dtype) for name, metric in self._metrics.items()},
            _network=self._network.to(device, dtype),
            target={name: t.to(device, dtype) for name, t in self.target.items()},
            tangents=[{name: θ.to(device, dtype) for name, θ in point.items()} for point in self.tangents],
        )

    def among(self, processes: Processes) -> Self:
        """The same objective, computed by several processes: each takes its share of the candidates."""
        if self.live and processes.count > 1:
            raise InvalidInputError("live batch normalisation needs all candidates on one process; run it on one")
        return self._changed(_processes=processes)

    def by_autograd(self) -> Self:
        """The same objective, differentiated as any network is, even if its layers are dense."""
        return self._changed(_may_be_dense=False)

    def with_exact_forward(self) -> Self:
        """The same objective with exact ReLUs in the forward pass: only their derivative is smoothed, to σ(βz).

        Haim et al. (2022) do so. The derivatives are then not exactly those of the loss.
        """
        return self._changed(exact_forward=True, _network=replace(self._network, exact_forward=True))

    def with_live_batch_norm(self) -> Self:
        """The same objective for a training whose batch normalisation was live, as in ``model.train()``.

        An output Φ_i(X) then depends on the whole batch X, by its mean and deviation. The gradient of the training loss
        is still a sum over images,

            r = T − Σ_i λ_i ∇_θ φ_i(θ*, X),

        and the candidates together are X. All of them are taken in one piece: there are no chunks, no further
        processes, and no splitting, because S(x_i) does not say how a copy of x_i changes the statistics of the others.
        All layers of batch normalisation are taken as live. Give as many candidates as there are training images.
        """
        return self._changed(live=True, _network=replace(self._network, live=True))

    def _changed(self, **attributes: Any) -> Self:
        """A copy with other attributes. It is not bound to shapes, because its engine may be another one."""
        other = copy.copy(self)
        vars(other).update(attributes, _bound=None)
        return other

    @property
    def device(self) -> torch.device:
        return next(iter(self.target.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.target.values())).dtype

    def identity(self) -> list[object]:
        """Everything that distinguishes this problem from another. A saved state carries its hash."""
        kind = [type(self), self.signed, self.label_kind, self._several_tangents]
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        settings = {name: value for name, value in public.items() if name not in ("sharpness", "chunk")}
        return [*kind, settings, self._network.state_dict()]

    def operations(self) -> list[object]:
        """What the operations of its derivatives depend on, besides candidates and the numbers in tensors."""
        flags = (self.signed, self.exact_forward, self.live, self.whitening, self.sharpness, self._may_be_dense)
        shapes = {name: tuple(t.shape) for name, t in self.target.items()}
        numbers = (self.weights if isinstance(self.weights, dict) else None, self.segments.shares)  # kernels hold them
        return [type(self), *flags, *numbers, shapes, str(self._network.module)]


def _copied(values: Mapping[str, Tensor]) -> Parameters:
    return {name: t.detach().clone() for name, t in values.items()}


def _total(parts: Iterable[Parameters]) -> Parameters:
    return functools.reduce(lambda v, part: {name: v[name] + part[name] for name in v}, parts)
