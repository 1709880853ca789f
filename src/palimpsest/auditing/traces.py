"""The trace of each image in the weights: how much of it, or of its gradient, the change of the weights holds.

Training adds Σ_i δ_i z_iᵀ to the weights W of a dense layer, where z_i is the layer's input at image i, with a 1 for
the bias. So the input of every training image lies in the row space of the change C = W − c W(0), and that of another
image does not. Only rounding, the drift of z_i during training and Adam blur this. With the inputs of all images,
whitened, the share of z that C leaves unexplained at the noise level ε is

    R_ε(z) = ε z̃ᵀ(C̃ᵀC̃ + εI)⁻¹z̃ / ‖z̃‖²,   z̃ = M^{−½}z,  C̃ = C M^{−½},  M = mean(z zᵀ) + sI

and the trace is the mean of −log R_ε over all noise levels. Without the whitening, natural images resemble each other
so much that many non-members lie close to the space, too.

A network without such a layer leaves the gradients f(x_i) at its images. The trace is then the drop of the floor: by
how much the unexplained share of the target T grows if the multipliers of image i alone are removed,

    λ_iᵀ D_i⁻¹ λ_i,   λ = (G + εI)⁻¹b,  G = FFᵀ,  b = FT,  D_i = block i of (G + εI)⁻¹.

With the final weights alone, gradients tell little. The trace is then log(1 + 1/loss), from the labels.

Every image, given or held out, is treated alike (see exchange.py). So an image that was not trained on ranks anywhere
among held-out images, whatever the network, and the ranks are p-values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.objectives.autograd import Network, Parameters
from palimpsest.objectives.binding import matching, parameters_of
from palimpsest.span import shrinkage
from palimpsest.training.losses import margins

Statistic = Literal["span", "gradients", "loss"]
Loss = Literal["squared", "logistic", "cross_entropy"]
Segment = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
POINTS = (0.0, 0.5, 1.0)  # of a segment, at which inputs and gradients are taken
SHRINK = 0.1  # s of the whitening, relative to the mean eigenvalue
LEVELS = torch.logspace(-12, 0, 25, dtype=torch.float64)  # ε, relative to the largest eigenvalue
RIDGE = 1e-3  # ε of the drop, relative to a gradient's square
SKETCH, EXACT = 1 << 14, 1 << 27  # numbers kept of a gradient, unless all gradients together have fewer than EXACT
MOST_UNITS = 2048  # of a layer; more are mixed at random, because their eigenvectors would take minutes
FEWEST = 16  # directions that a layer needs to tell images apart
DECAYED = 1e-3  # share of the initial weights that must be gone before weight decay is looked for
BATCH = 64


@dataclass(frozen=True)
class Traces:
    """The traces of images, and where they were found."""

    values: Tensor
    """(N,), never negative. Those of training images are larger."""
    statistic: Statistic
    layer: str | None
    """The dense layer of the span."""
    shrinkage: float
    """c of the last segment: what weight decay left of the weights at its start."""


def traces(
    model: nn.Module, segments: Sequence[Segment], images: Tensor, *, statistic: Statistic | None = None
) -> Traces:
    """The trace of each image (as the network sees it) in the changes of the weights, or in the weights themselves.

    Args:
        model: the trained network.
        segments: the weights before and after each segment of the training. If empty, the target is θ, as for KKT.
        images: (N, *image_shape). Images to test and held-out images must be given together.
        statistic: ``"span"`` or ``"gradients"``. None chooses the span if a dense layer shows it.
    """
    layer = widest_dense_layer(model, images[:BATCH], segments)
    if statistic == "span" and layer is None:
        raise InvalidInputError("the span needs the initial weights and a trained dense layer that sees each image "
                                "once; leave out the statistic")  # fmt: skip
    names = list(parameters_of(model))
    if not names:
        raise InvalidInputError("no parameter of the network is trainable; set requires_grad on the trained ones")
    network = Network(model)
    c = [1.0 if layer is None else _decay(_matrix(a, layer), _matrix(b, layer)) for a, b in segments]
    ways = [_Way(names, *segment, c_j) for segment, c_j in zip(segments, c, strict=True)]
    if layer is not None and statistic != "gradients":
        # Late segments move little and blur the traces; each counts by how far the layer moved.
        energies = torch.stack([_change(way, layer).square().sum() for way in ways])
        values = torch.stack([_span_on(network, way, layer, images) for way in ways])
        return Traces((energies / energies.sum()) @ values, "span", layer, c[-1])
    state = dict(model.state_dict())
    points = [[way.at(t) for t in POINTS] for way in ways] or [[state]]
    targets = [way.change for way in ways] or [parameters_of(model)]
    parts = zip(targets, points, strict=True)
    values = torch.stack([_drop_on(network, T, θs, state, images) for T, θs in parts]).mean(0)
    return Traces(values, "gradients", None, c[-1] if c else 1.0)


def _finite(rows: Tensor) -> Tensor:
    """Rows (N, …), one for each image. One NaN would spread to the traces of all."""
    broken = (~rows.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if broken:
        raise NonFiniteError(f"the network computes NaN or infinity from image {broken[0] + 1} of {len(rows)}, given "
                             "and then held out; leave it out, or check the mean and the deviation")  # fmt: skip
    return rows


@dataclass(frozen=True)
class _Way:
    """A segment of the training: from cθ_{j−1} to θ_j."""

    names: Sequence[str]
    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    shrinkage: float

    @property
    def change(self) -> Parameters:
        start = matching(self.start, {name: self.end[name] for name in self.names})
        return {name: self.end[name] - self.shrinkage * start[name] for name in self.names}

    def at(self, t: float) -> Parameters:
        """The weights at a point of the segment; other tensors, such as buffers, are those at its end."""
        return {n: torch.lerp(self.start[n].to(b), b, t) if n in self.names else b for n, b in self.end.items()}


# --- the span ---------------------------------------------------------------------------------------


def widest_dense_layer(model: nn.Module, images: Tensor, segments: Sequence[Segment]) -> str | None:
    """The dense layer that distinguishes most images; the first of equals. None if each is too narrow.

    It must have moved on one of the segments, see each image once, as one row, and own its weights.
    """
    calls = _inputs(Network(model), dict(model.state_dict()), images, layer=None)
    tensors = [p for _, p in model.named_parameters(remove_duplicate=False)]
    best, widest = FEWEST - 1, None
    for name, seen in calls.items():
        W = model.get_submodule(name).get_parameter("weight")
        alone = len(seen) == 1 and seen[0].ndim == 2 and len(seen[0]) == len(images)  # patches are more rows
        moved = any(not torch.equal(a[f"{name}.weight"], b[f"{name}.weight"]) for a, b in segments)
        usable = alone and moved and W.requires_grad and sum(W is p for p in tensors) == 1
        if usable and min(W.shape) > best:
            best, widest = min(W.shape), name
    return widest


def _inputs(network: Network, θ: Parameters, images: Tensor, *, layer: str | None) -> dict[str, list[Tensor]]:
    """The inputs of each call of a dense layer, or of this one alone."""
    calls: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda m, args, n=name: calls.setdefault(n, []).append(args[0].detach()))
        for name, module in network.module.named_modules()
        if isinstance(module, nn.Linear) and name in (name if layer is None else layer,)
    ]
    try:
        with torch.no_grad():
            network(θ, images, None)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _matrix(state: Mapping[str, Tensor], layer: str) -> Tensor:
    """(W, b) in float64."""
    W, b = state[f"{layer}.weight"], state.get(f"{layer}.bias")
    matrix = (W if b is None else torch.cat([W, b[:, None]], 1)).detach().double()
    if not bool(matrix.isfinite().all()):
        raise NonFiniteError(f"the weights of {layer!r} contain NaN or infinity; check the file or the training")
    return matrix


def _change(way: _Way, layer: str) -> Tensor:
    """C = W − c W(0)."""
    return _matrix(way.end, layer) - way.shrinkage * _matrix(way.start, layer)


def _decay(start: Tensor, end: Tensor) -> float:
    """c, if W − cW(0) is far closer to low rank than W − W(0); else 1."""
    if abs(float((end - start).mul(start).sum() / start.square().sum().clamp_min(1e-300))) < DECAYED:
        return 1.0
    a, b = start[:512], end[:512]  # a number that all units share
    c = shrinkage(b, a)
    tails = [torch.linalg.svdvals(b - factor * a).square() for factor in (1.0, c)]
    plain, undone = (float(σ2[len(σ2) // 2 :].sum()) for σ2 in tails)
    return c if undone < plain / 4 else 1.0


def _span_on(network: Network, way: _Way, layer: str, images: Tensor) -> Tensor:
    """The trace on one segment: the mean over its points, if the layer's inputs depend on them."""
    C = _change(way, layer)
    bias = f"{layer}.bias" in way.end
    found: list[Tensor] = []
    Zs: list[Tensor] = []
    for t in POINTS:
        rows = [_inputs(network, way.at(t), part, layer=layer)[layer][0] for part in images.split(BATCH)]
        Z = _finite(torch.cat(rows).double())
        if Zs and torch.equal(Z, Zs[0]):
            break
        Zs.append(Z)
        found.append(span_trace(C, torch.cat([Z, Z.new_ones(len(Z), 1)], 1) if bias else Z))
    return torch.stack(found).mean(0)


def span_trace(C: Tensor, Z: Tensor) -> Tensor:
    """mean_ε −log R_ε(z) for each row z of Z (N, d), from the change C (units, d) of the layer, in float64.

    M⁻¹ = (I − Zᵀ(K + NsI)⁻¹Z)/s with K = ZZᵀ, so only N×N and units×units matrices are decomposed.
    """
    Z = Z / Z.norm(dim=1, keepdim=True).clamp_min(1e-300)
    N, d = Z.shape
    if len(C) > min(d, MOST_UNITS):
        random = torch.Generator().manual_seed(0)
        C = torch.randn(min(d, MOST_UNITS), len(C), generator=random, dtype=torch.float64).to(C) @ C
    K, ZC = Z @ Z.T, Z @ C.T
    s = SHRINK * K.trace() / (N * d)
    L = torch.linalg.cholesky(K + N * s * torch.eye(N).to(K))
    solved = torch.cholesky_solve(torch.cat([ZC, K], 1), L)
    ZMC, zMz = N * solved[:, : len(C)], N * solved[:, len(C) :].diagonal()  # ZM⁻¹Cᵀ and zᵀM⁻¹z
    λ, U = torch.linalg.eigh((C @ C.T - ZC.T @ solved[:, : len(C)]) / s)  # of CM⁻¹Cᵀ = C̃C̃ᵀ
    known = λ > 1e-14 * λ[-1].clamp_min(1e-300)
    λ, U = λ[known], U[:, known]
    share = (ZMC @ U).square() / (λ * zMz[:, None])  # of z̃ along each right singular vector of C̃
    beyond = (1 - share.sum(1)).clamp_min(1e-12)
    levels = LEVELS.to(λ) * λ.max() if len(λ) else LEVELS.to(λ)
    R = torch.stack([(share * (ε / (λ + ε))).sum(1) + beyond for ε in levels])
    return -R.clamp_max(1).log().mean(0)


# --- the gradients ----------------------------------------------------------------------------------


def _drop_on(network: Network, T: Parameters, points: Sequence[Parameters], end: Parameters, images: Tensor) -> Tensor:
    """The drop of the floor on one segment, from gradients that are sketched if they do not fit in memory."""
    P = sum(t.numel() for t in T.values())
    width = P if len(images) * len(points) * P <= EXACT else SKETCH
    sketch = _sketch(P, width, next(iter(T.values())))
    with torch.no_grad():
        outputs = torch.cat([network(end, part, None) for part in images.split(BATCH)])
    top = outputs.argmax(1)
    rows = [torch.stack([sketch(_gradient(network, list(T), θ, x, y)) for θ in points])
            for x, y in zip(images, top, strict=True)]  # fmt: skip
    target = sketch(torch.cat([t.flatten() for t in T.values()]))
    return floor_drop(_finite(torch.stack(rows).double()), target.double())


def _gradient(network: Network, names: Sequence[str], θ: Parameters, x: Tensor, y: Tensor) -> Tensor:
    """∇_θ φ(θ, x) as one vector: φ is the output, or the log-probability of the class that training arrived at."""
    leaves = {name: θ[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        outputs = network(θ | leaves, x[None], None)[0]
        φ = outputs[0] if len(outputs) == 1 else outputs.log_softmax(0)[y]
        parts = torch.autograd.grad(φ, list(leaves.values()), materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def _sketch(P: int, width: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    """f ↦ Sf, with random signs and one non-zero per column: ⟨Sf, Sg⟩ = ⟨f, g⟩ up to ‖f‖‖g‖/√width."""
    if width == P:
        return lambda f: f
    signs = 2 * torch.randint(2, (P,), generator=torch.Generator().manual_seed(0)).to(like) - 1
    length = width * math.ceil(P / width)
    return lambda f: nn.functional.pad(signs * f, (0, length - P)).view(-1, width).sum(0)


def floor_drop(F: Tensor, T: Tensor) -> Tensor:
    """By how much the unexplained share of T (P,) grows without image i, from its gradients F (N, points, P).

    The multipliers minimise ‖T − Σ λ f‖² + ε‖λ‖² over gradients of unit length, and the growth is that of this minimum.
    """
    N, points, P = F.shape
    rows = (F / F.norm(dim=2, keepdim=True).clamp_min(1e-300)).reshape(N * points, P)
    inverse = torch.linalg.inv(rows @ rows.T + RIDGE * torch.eye(N * points).to(rows))
    λ = (inverse @ (rows @ T)).view(N, points)
    D = inverse.view(N, points, N, points).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return (λ * torch.linalg.solve(D, λ)).sum(1) / T.square().sum().clamp_min(1e-300)


# --- the loss ---------------------------------------------------------------------------------------


def loss_trace(
    model: nn.Module, images: Tensor, labels: Tensor, loss: Loss | None, *, classes: int | None = None
) -> Traces:
    """log(1 + 1/L) of each image's loss L: how well the final weights fit it.

    Labels are 0…C−1, or ±1 for one output. ``classes`` is their number, if the order of their names made the labels.
    """
    with torch.no_grad():
        Φ = torch.cat([Network(model)(dict(model.state_dict()), part, None) for part in images.split(BATCH)]).double()
    outputs = _finite(Φ).shape[1]
    if loss not in ("squared", "logistic" if outputs == 1 else "cross_entropy"):
        fitting = "squared or logistic" if outputs == 1 else "squared or cross_entropy"
        raise InvalidInputError(f"the loss is {loss}; the network has {outputs} output(s), so give {fitting}")
    C = max(2, outputs)
    if classes not in (None, C):  # one that is missing would shift the numbers of those after it
        raise InvalidInputError(f"there are {classes} sub-folders of held-out images, but the network tells {C} classes"
                                " apart; give one for each")  # fmt: skip
    if not any(set(labels.tolist()) <= known for known in (set(range(C)), {-1, 1} if outputs == 1 else set())):
        raise InvalidInputError(f"the labels go from {int(labels.min())} to {int(labels.max())}, but the network tells "
                                f"{C} classes apart; number them 0 to {C - 1}")  # fmt: skip
    y = (2 * (labels[:, None] > 0) - 1 if outputs == 1 else nn.functional.one_hot(labels.long(), outputs)).to(Φ)
    L = (Φ - y).square().sum(1) if loss == "squared" else nn.functional.softplus(-margins(Φ, y))
    return Traces(torch.log1p(1 / L.clamp_min(1e-300)), "loss", None, 1.0)
