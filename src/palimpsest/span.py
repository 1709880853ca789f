"""Number and space of the training images, from the change of the first layer.

Every step of (stochastic) gradient descent, with or without momentum, adds a matrix Σ_i (…)·(x_i, 1) to the first
layer's (W_1, b_1), whatever the depth and the loss. So the row space of (ΔW_1, Δb_1) lies in span{(x_i, 1)}. Its rank
is the number of training images, unless these are linearly dependent or some always activate the same units. The rank
then counts what the layer distinguishes, and no method can read more out of it.

With weight decay the same holds for W_1 − c·W_1(0), where c is the total shrinkage of the initial weights. Checkpoints
on the way give such a change for each segment between them. The rows of all changes together lie in the same span.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.methods.path import Checkpoints, segments_of
from palimpsest.networks import PolynomialNetwork
from palimpsest.objectives.spaces import Subspace

GAP = 3.0  # adjacent singular values of noise differ by a few per cent
DENSE = nn.Linear | PolynomialNetwork
DRIFT = 300.0  # rounding errors add up over a training; this many of them still count as rounding


@dataclass(frozen=True)
class Span:
    """The space of the training images, or why it cannot be read."""

    samples: int | None  # the number of training images that the layer distinguishes; None without a gap
    subspace: Subspace | None = field(repr=False)  # x̄ + Qc ∋ x_i; images are flat, see :meth:`Subspace.shaped`
    gap: float  # σ_n / σ_{n+1} of the first layer's change: the evidence
    singular_values: Tensor = field(repr=False)  # of (W_1 − c W_1(0), b_1 − c b_1(0)), without constant inputs
    shrinkages: tuple[float, ...]  # c_j of each segment between checkpoints: 1 without weight decay
    reason: str  # one sentence on the result
    limit: int  # the number of directions that the layer could show: units that moved, or inputs that varied

    @property
    def shrinkage(self) -> float:
        """c of the whole training: the product of all c_j."""
        return math.prod(self.shrinkages)

    def shrunk(self, initial: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """c·θ_0: what weight decay left of the initial weights. Without weight decay, these weights themselves."""
        return initial if self.shrinkage == 1 else {name: self.shrinkage * t for name, t in initial.items()}


def span(
    model: nn.Module,
    initial: Mapping[str, Tensor] | Checkpoints,
    *,
    image_shape: Sequence[int] | None = None,
) -> Span:
    """Count the training images, and find the space that they span, from the change of the first layer.

    The count relies on a gap: the layer moved in n directions, and in all others by no more than rounding. If there is
    no gap, ``samples`` is None. Adam leaves no gap, because its steps leave the span of the images.

    Args:
        model: the trained network. Its first layer must be dense and see the whole image.
        initial: its weights before training, a state dict, or the checkpoints of `pal.Path`: a list of state dicts from
            the first to the last weights, or of pairs. The space is then that of all segments together.
        image_shape: the shape of one image. Give it if the network takes images of several sizes, or no flat ones.

    Returns:
        An object with these attributes. ``samples``: the number of training images, or None. ``subspace``: the
            `Subspace` of flat images, for ``pal.reconstruct(…, within=…)``, or None. ``gap``: the ratio of singular
            values behind the count. ``singular_values``: all of them. ``shrinkage``: 1 without weight decay.
            ``shrinkages``: the same for each segment between checkpoints. ``reason``: one sentence on the result.
            ``limit``: the number of directions that the layer could show, so a count near it is doubtful.
            ``shrunk(initial)``: the initial weights as weight decay left them, for ``pal.NTK``.

    Images that were centred by their own mean are linearly dependent. If the first layer does not have a bias, the
    count is then one too low. Weight decay is assumed to act on weights and biases alike.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> images, labels = torch.randn(3, 16), torch.tensor([1, -1, 1])
        >>> fit = pal.train(pal.networks.MLP(16, hidden=(40,)), images, labels, steps=50)
        >>> pal.span(fit.model, fit.initial).samples
        3
    """
    names = first_dense_layer(model, image_shape)
    if names is None:
        raise InvalidInputError("no dense layer of the network sees whole images; if one does, give image_shape")
    states = [initial, dict(model.named_parameters())] if isinstance(initial, Mapping) else initial
    layers = [(_matrix(start, names), _matrix(end, names)) for start, end in segments_of(states)]
    rounding = torch.finfo(model.get_parameter(names[0]).dtype).eps * float(layers[-1][1].square().mean().sqrt())
    if len(shapes := {tuple(layer.shape) for pair in layers for layer in pair}) > 1:
        different = ", ".join(map(str, sorted(shapes)))
        raise InvalidInputError(f"the first layer has the shapes {different}; give the weights of one network")
    has_bias = len(names) > 1
    if has_bias and all(torch.equal(a[:, -1], b[:, -1]) for a, b in layers):  # a frozen bias holds no trace
        layers, has_bias = [(a[:, :-1], b[:, :-1]) for a, b in layers], False
    reading = _read(layers, [1.0] * len(layers), has_bias, rounding)
    if reading.samples is None and layers[0][0].any():  # perhaps the initial weights have decayed
        decayed = _read(layers, [shrinkage(b, a) for a, b in layers], has_bias, rounding)
        reading = decayed if decayed.samples is not None else reading
    return reading


def first_dense_layer(model: nn.Module, image_shape: Sequence[int] | None = None) -> list[str] | None:
    """The names of the weights and of the bias, if any, of the dense layer that sees the images themselves.

    Its inputs must be whole images that do not depend on parameters. It must be called once and must not share its
    weights, because their change would then have other sources than the images. None if there is no such layer.
    """
    shapes = _possible_shapes(model) if image_shape is None else [tuple(image_shape)]
    calls = next(filter(None, (_dense_calls(model, shape) for shape in shapes)), [])
    first = next((name for name, sees_images in calls if sees_images), None)
    if first is None or [name for name, _ in calls].count(first) > 1:
        return None
    layer = model.get_submodule(first)
    own = {n: layer._parameters[n] for n in _names(layer) if layer._parameters.get(n) is not None}
    if any(p is q for p in own.values() for m in model.modules() if m is not layer for q in m._parameters.values()):
        return None
    return [f"{first}.{n}" if first else n for n in own]


def _names(layer: nn.Module) -> tuple[str, str]:
    """The names of a dense layer's weights and bias."""
    return ("W", "b") if isinstance(layer, PolynomialNetwork) else ("weight", "bias")


def _possible_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """The network's own image_shape, else flat images of each length that one of its dense layers takes."""
    if (own := getattr(model, "image_shape", None)) is not None:
        return [tuple(own)]
    layers = (layer for layer in model.modules() if isinstance(layer, DENSE))
    return [(length,) for length in dict.fromkeys(getattr(layer, _names(layer)[0]).shape[1] for layer in layers)]


def _dense_calls(model: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, bool]]:
    """Each call of a dense layer for images of this shape, and whether it sees them. Empty if the network fails."""
    calls: list[tuple[str, bool]] = []

    def watch(name: str, layer: nn.Module, inputs: Tensor) -> None:
        W = layer._parameters.get(_names(layer)[0])
        whole = len(inputs) == 2 and inputs[0].numel() == math.prod(shape) and not inputs.requires_grad
        calls.append((name, W is not None and whole and W.shape[1] == inputs[0].numel()))

    try:
        model = copy.deepcopy(model).requires_grad_()  # then whatever depends on a parameter requires a gradient
        for name, layer in model.named_modules():
            if isinstance(layer, DENSE):
                layer.register_forward_pre_hook(lambda m, args, name=name: watch(name, m, args[0]))
        images = 0.2 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        with torch.enable_grad():
            model(images.to(next(model.parameters())))
    except Exception:  # the user's code may raise anything on images of another shape
        return []
    return calls


def _matrix(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """(W_1, b_1) in float64."""
    if missing := [n for n in names if n not in state]:
        raise InvalidInputError(f"the initial weights do not hold {missing[0]!r}; give a full state dict")
    W, *b = [state[n].detach().double() for n in names]
    matrix = torch.cat([W, *(v[:, None] for v in b)], dim=1)
    if not bool(matrix.isfinite().all()):
        raise NonFiniteError("the first layer contains NaN or infinity; check the file or the training")
    return matrix


def _read(layers: Sequence[tuple[Tensor, Tensor]], c: Sequence[float], has_bias: bool, rounding: float) -> Span:
    """The reading of (W_1, b_1) at both ends of each segment. The rows of W_1(j) − c_j W_1(j−1) span the images."""
    change = torch.cat([b - c_j * a for c_j, (a, b) in zip(c, layers, strict=True)])
    varying = change[:, _varying(change, has_bias, rounding)]
    σ = torch.linalg.svdvals(varying)
    # Random rounding errors of size ε in an (m, d) matrix have singular values up to ε(√m + √d).
    noise = rounding * (varying.shape[0] ** 0.5 + varying.shape[1] ** 0.5)
    ratios = (σ[:-1] / σ[1:].clamp_min(noise)).masked_fill(σ[1:] > DRIFT * noise, 0.0)
    limit = min(int((varying.norm(dim=1) > noise).sum()), varying.shape[1])
    n = int(ratios.argmax()) + 1 if len(ratios) else 0
    gap = float(ratios[n - 1]) if n else 0.0
    if gap < GAP:
        every = "every direction of the first layer moved by more than rounding, as after Adam, noise or many images"
        why = every if gap == 0 else "the gap is too small"
        return Span(None, None, gap, σ, tuple(c), f"no number of images can be read: {why}", limit)
    found = f"{n} directions moved, {gap:.3g} times beyond the next"
    return Span(n, _subspace(change, n, has_bias), gap, σ, tuple(c), found, limit)


def _varying(change: Tensor, has_bias: bool, rounding: float) -> Tensor:
    """The columns of inputs that varied. A constant one moved in proportion to the bias, or not at all.

    Constant columns would limit the rank whatever the number of images, and their gap would look like an answer.
    """
    inputs = change[:, :-1] if has_bias else change
    bias = change[:, -1:] if has_bias else torch.zeros_like(change[:, :1])
    along = bias @ (bias.T @ inputs) / bias.square().sum().clamp_min(1e-300)
    varies = (inputs - along).norm(dim=0) > DRIFT * rounding * len(change) ** 0.5
    return torch.cat([varies, varies.new_ones(1)]) if has_bias else varies


def shrinkage(final: Tensor, start: Tensor) -> float:
    """c such that W − c·W(0) has low rank: an eigenvalue of W W(0)⁺ repeated once for every unmoved direction."""
    if final.shape[0] > final.shape[1]:
        final, start = final.T, start.T
    eigenvalues = torch.linalg.eigvals(final @ torch.linalg.pinv(start)).real.sort().values
    window = max(3, len(eigenvalues) // 10)
    spread = eigenvalues[window - 1 :] - eigenvalues[: len(eigenvalues) - window + 1]
    tightest = int(spread.argmin()) if len(spread) else 0
    c = float(eigenvalues[tightest : tightest + window].median())
    for _ in range(3):  # polish: in the directions that moved least, W is c·W(0)
        still = torch.linalg.svd(final - c * start, full_matrices=False)[2][-window:].T
        c = float(((final @ still) * (start @ still)).sum() / (start @ still).square().sum())
    return c


def _subspace(change: Tensor, n: int, has_bias: bool) -> Subspace:
    """{x : (x, 1) in the row space}, an affine space of dimension n − 1; the row space itself without a bias."""
    rows = torch.linalg.svd(change, full_matrices=False)[2][:n]
    if not has_bias:
        return Subspace(torch.zeros_like(rows[0]), rows)
    last = rows[:, -1]
    a = last / last.square().sum()
    flat = torch.linalg.svd(last[None])[2][1:]  # combinations of the rows whose last entry vanishes
    return Subspace((a @ rows)[:-1], (flat @ rows)[:, :-1])
