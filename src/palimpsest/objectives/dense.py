"""Stacks of dense layers, differentiated by hand with the fewest matrix products.

For Φ(x) = W_L h_{L−1}, h_l = σ(z_l), z_l = W_l h_{l−1} + b_l, h_0 = x, one candidate's share of v = ∇_θ λφ(Φ(x)) is

    δ_L = λ φ'(Φ),   u_l = W_{l+1}ᵀ δ_{l+1},   δ_l = u_l ∘ σ'(z_l),   V_l = δ_l h_{l−1}ᵀ,

and the adjoint, applied to R (that is w∘r), is ∇_x and ∇_λ of λ times the derivative of φ in direction R:

    ż_l = R_l h_{l−1} + W_l ḣ_{l−1},   ḣ_l = σ'(z_l) ∘ ż_l                                   (ḣ_0 = 0)
    z̄_l = σ'(z_l) ∘ h̄_l + σ''(z_l) ∘ u_l ∘ ż_l,   h̄_{l−1} = W_lᵀ z̄_l + R_lᵀ δ_l,   x̄ = h̄_0.

The second pass uses the δ and u of the first, so a d–m–m–1 network takes 5·kdm + 7·km² multiply-adds. Several tangent
nodes share x and R: products that are linear in δ_1 are done once for their sum, and R_1 x once for all.

All V_l and biases but V_1, and all products R_l h_{l−1} and R_lᵀδ_l, need nothing of their own pass. They run aside.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palimpsest.execution.aside import aside
from palimpsest.execution.fusion import fusible
from palimpsest.objectives.smoothing import REACH, Smoothed, softplus

Parameters = dict[str, Tensor]
Adjoint = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
ALIGNED = 8  # numbers in a row: tensor cores work on multiples of it
Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The names of a dense layer's parameters."""

    weight: str
    bias: str | None


def recognise(network: nn.Module, x: Tensor) -> tuple[Layer, ...] | None:
    """The layers of a network that is x ↦ W_L σ(… σ(W_1 x + b_1) …) + b_L with ReLUs σ, or None for any other.

    The network is recognised by its outputs, not by its class. With smoothed ReLUs it is analytic, so agreement on few
    random inputs in float64 means agreement on all.
    """
    network = copy.deepcopy(network).double().requires_grad_(False)
    calls: list[tuple[str, Tensor, Tensor]] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(_note, calls, name), with_kwargs=True)
    generator, β = torch.Generator().manual_seed(0), 3.0
    probe = torch.randn(4, *x.shape[1:], generator=generator, dtype=torch.float64).to(x.device)
    try:
        with torch.no_grad(), Smoothed(β):
            outputs = network(probe).reshape(len(probe), -1)
    except (Exception, SystemExit):  # the user's code need not work in float64
        return None
    parameters = dict(network.named_parameters())
    names = [(f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")) for name, _, _ in calls]
    layers = tuple(Layer(weight, bias if bias in parameters else None) for weight, bias in names)
    accounted = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    if not calls or sorted(accounted) != sorted(parameters):  # a layer used twice, a weight shared or of another kind
        return None
    h = probe.flatten(1)
    for layer, (_, given, returned) in zip(layers, calls, strict=True):
        if not _same(given, h):  # the layers are not in a row
            return None
        z = _affine(h, layer, parameters)
        if not _same(returned, z):
            return None
        h = softplus(z, β)
    return layers if _same(outputs, z) else None


def _note(calls: list[tuple[str, Tensor, Tensor]], name: str, _: nn.Module, args, kwargs, output: Tensor) -> None:
    calls.append((name, args[0] if args else kwargs["input"], output))


def aligned(rows: Tensor, last: Tensor) -> Tensor:
    """Rows with a last column, padded with zeros to a length that suits tensor cores."""
    return F.pad(torch.cat([rows, last], -1), (0, -(rows.shape[-1] + 1) % ALIGNED))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-10 * float(b.abs().max()))


@dataclass
class _Pass:
    """The forward and backward pass of one tangent node; lists are indexed by layer, l = 0 … L."""

    W: list[Tensor]
    h: list[Tensor]
    slope: list[Tensor]  # σ'(z_l)
    up: list[Tensor]  # u_l
    δ: list[Tensor]
    output: Output


def linearise(
    layers: Sequence[Layer],
    nodes: Sequence[tuple[Mapping[str, Tensor], Tensor]],
    scalar: Scalar,
    x: Tensor,
    β: float | Tensor | None,
    *,
    into: Mapping[str, Tensor],
    exact_forward: bool = False,
    linear: bool = False,
) -> Adjoint:
    """Writes v = Σ_s ∇_θ Σ_i λ_is φ(θ_s, x_i) at x (k, d) into memory of its size, and returns the map R ↦ (x̄, λ̄).

    Several nodes add an axis to λ̄.
    """
    L = len(layers)
    passes = [_forward_and_back(layers, θ, λ, scalar, x, β, exact_forward, linear) for θ, λ in nodes]
    first_δ = functools.reduce(torch.add, [p.δ[1] for p in passes])
    others = aside(partial(_represent_others, layers, passes, first_δ, into))
    torch.mm(first_δ.T, x, out=into[layers[0].weight])
    others()

    def adjoint(R: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        Rh, Rᵀδ = _products(layers, passes, R)
        first_Rᵀδ = aside(partial(torch.mm, first_δ, R[layers[0].weight]))
        ż_1 = _affine(x, layers[0], R)
        z̄_1, λ̄ = [], []
        for s, p in enumerate(passes):
            ż = [ż_1, ż_1]
            for j in range(2, L + 1):
                ż.append(Rh[s, j]().addmm_(p.slope[j - 1] * ż[j - 1], p.W[j].T))
            z̄, λ̄_s = p.output.adjoint(ż[L])
            λ̄.append(λ̄_s)
            for j in range(L - 1, 0, -1):
                h̄ = Rᵀδ[s, j + 1]()
                h̄ = h̄ if z̄ is None else h̄.addmm_(z̄, p.W[j + 1])
                z̄ = _curved(h̄, p.slope[j], p.up[j], ż[j], β)
            z̄_1.append(z̄)
        x̄ = first_Rᵀδ()
        for z̄, p in zip(z̄_1, passes, strict=True):
            if z̄ is not None:
                x̄.addmm_(z̄, p.W[1])
        return x̄, λ̄[0] if len(λ̄) == 1 else torch.stack(λ̄, 1)

    return adjoint


def _represent_others(
    layers: Sequence[Layer], passes: Sequence[_Pass], first_δ: Tensor, into: Mapping[str, Tensor]
) -> None:
    """Writes all of v but V_1."""
    if layers[0].bias is not None:
        torch.sum(first_δ, 0, out=into[layers[0].bias])
    for j, layer in enumerate(layers[1:], start=2):
        _sum_of_products([(p.δ[j].T, p.h[j - 1]) for p in passes], out=into[layer.weight])
        if layer.bias is not None:
            torch.sum(passes[0].δ[j], 0, out=into[layer.bias])
            for p in passes[1:]:
                into[layer.bias].add_(p.δ[j].sum(0))


def _products(
    layers: Sequence[Layer], passes: Sequence[_Pass], R: Mapping[str, Tensor]
) -> tuple[dict[tuple[int, int], Callable[[], Tensor]], dict[tuple[int, int], Callable[[], Tensor]]]:
    """R_l h_{l−1} and R_lᵀδ_l by pass and layer l > 1."""
    numbered = [(s, p, j, layers[j - 1]) for s, p in enumerate(passes) for j in range(2, len(layers) + 1)]
    Rh = {(s, j): aside(partial(_affine, p.h[j - 1], layer, R)) for s, p, j, layer in numbered}
    Rᵀδ = {(s, j): aside(partial(_back, p.δ[j], R[layer.weight])) for s, p, j, layer in numbered}
    return Rh, Rᵀδ


def _forward_and_back(
    layers: Sequence[Layer],
    θ: Mapping[str, Tensor],
    λ: Tensor,
    scalar: Scalar,
    x: Tensor,
    β: float | Tensor | None,
    exact_forward: bool,
    linear: bool,
) -> _Pass:
    L, rectified = len(layers), _exactly_rectified if exact_forward and β is not None else _rectified
    W = [x, *(θ[layer.weight] for layer in layers)]  # W[0] and slope[0] are not used
    h, slope = [x], [x]
    for layer in layers[:-1]:
        h_j, slope_j = rectified(_affine(h[-1], layer, θ), β)
        h.append(h_j)
        slope.append(slope_j)
    output: Output
    if linear and len(W[L]) == 1:
        output = LinearOutput(h[-1][:, :1], λ, scalar)  # of Φ, only the shape counts
    else:
        output = Output(_affine(h[-1], layers[-1], θ), λ, scalar)
    up, δ = [x] * (L + 1), [output.δ] * (L + 1)
    for j in range(L - 1, 0, -1):
        up[j] = _back(δ[j + 1], W[j + 1])
        δ[j] = up[j] * slope[j]
    return _Pass(W, h, slope, up, δ, output)


class Output:
    """δ_L = λφ'(Φ) for scalars φ of the outputs Φ, and the derivatives of ⟨δ_L, Φ̇⟩."""

    def __init__(self, Φ: Tensor, λ: Tensor, scalar: Scalar) -> None:
        with torch.enable_grad():
            self._Φ, self._λ = Φ.detach().requires_grad_(), λ.detach().requires_grad_()
            (self._δ_L,) = torch.autograd.grad(scalar(self._Φ), self._Φ, self._λ, create_graph=True)
        self.δ = self._δ_L.detach()

    def adjoint(self, Φ̇: Tensor) -> tuple[Tensor | None, Tensor]:
        """∂/∂Φ, None if φ is linear, and ∂/∂λ."""
        z̄, λ̄ = torch.autograd.grad(self._δ_L, (self._Φ, self._λ), Φ̇, allow_unused=True)
        return z̄, λ̄


class LinearOutput(Output):
    """The same for φ(Φ) = cΦ of one output, without autograd, whose bookkeeping dominates small networks."""

    def __init__(self, Φ: Tensor, λ: Tensor, scalar: Scalar) -> None:
        self._c = scalar(torch.ones_like(Φ))
        self.δ = (self._c * λ)[:, None]

    def adjoint(self, Φ̇: Tensor) -> tuple[None, Tensor]:
        return None, self._c * Φ̇[:, 0]


def _affine(h: Tensor, layer: Layer, values: Mapping[str, Tensor]) -> Tensor:
    return F.linear(h, values[layer.weight], values[layer.bias] if layer.bias else None)


def _back(δ: Tensor, W: Tensor) -> Tensor:
    """δ W. With one output this is an outer product, for which libraries of matrix products are slow."""
    return δ * W if len(W) == 1 else δ @ W


def _sum_of_products(factors: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
    (A, B), *others = factors
    torch.mm(A, B, out=out)
    for A, B in others:
        out.addmm_(A, B)


@fusible
def _rectified(z: Tensor, β: float | Tensor | None) -> tuple[Tensor, Tensor]:
    """σ(z) and σ'(z)."""
    if β is None:
        return z.relu(), (z > 0).to(z)
    y = (z * β).clamp_min_(-REACH)
    slope = y.sigmoid()
    if y.is_cuda:
        return F.softplus(y, beta=1, threshold=REACH) / β, slope
    # log(1 + eʸ) = max(y, 0) − log σ'(|y|): torch's softplus does not use the vector units of a CPU
    larger = 1 - slope
    torch.maximum(slope, larger, out=larger)
    return y.relu_().sub_(larger.log_()).div_(β), slope


@fusible
def _exactly_rectified(z: Tensor, β: float | Tensor) -> tuple[Tensor, Tensor]:
    """max(z, 0), and the derivative of the softplus."""
    return z.relu(), (z * β).sigmoid()


@fusible
def _curved(h̄: Tensor, slope: Tensor, u: Tensor, ż: Tensor, β: float | Tensor | None) -> Tensor:
    """σ' ∘ h̄ + σ'' ∘ u ∘ ż, with σ'' = β σ'(1 − σ')."""
    return h̄ * slope if β is None else torch.addcmul(h̄, u * ż, (1 - slope).mul_(β)).mul_(slope)
