"""Dense layers within a subspace: the same objective for a network with fewer inputs.

Candidates x = x̄ + Qc enter a dense first layer as W_1 x, and explain Σ_i δ_i x_iᵀ of T_1. Let P be an orthonormal basis
of span{x̄, Q}, and A any invertible matrix. A network with inputs u = A Pᵀx and first layer W_1 P A⁻¹ computes the same
outputs. For the target T_1 P Aᵀ its residual is

    T_1 P Aᵀ − Σ_i δ_i u_iᵀ = (T_1 − Σ_i δ_i x_iᵀ) P Aᵀ.

With A = 1 this is the original residual, with one column for each dimension of the subspace instead of each pixel.
No candidate explains the part of T_1 outside the subspace. It is one more column, for an input that is always 0.

**Whitening** takes AᵀA = (PᵀT_1ᵀT_1P)^(−p). The singular values of T_1 fall off steeply, because training learns many
times over what images have in common. The last ones hardly change the loss, but they distinguish images. The error of
the linearised network falls off with them, so by generalised least squares each direction should count by the inverse
of its own error. With p = 0 the loss does not change; with p = 1 all directions count alike. A is scaled so that ‖T_1‖
stays the same. Several targets share the inputs, so they share A, whose T_1 then holds the rows of all T_1/‖T‖.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from palimpsest.objectives.dense import Layer, aligned
from palimpsest.objectives.spaces import Subspace
from palimpsest.objectives.weighting import Likelihood

Parameters = dict[str, Tensor]
ROUNDING = 1e-6  # of the offset: a smaller part of it beyond the subspace is rounding
SMALLEST = 1e-4  # of the largest singular value of T_1: whitening would magnify the rounding below it


def reduce(
    layers: Sequence[Layer],
    space: Subspace,
    target: Parameters,
    tangents: Sequence[Parameters],
    weights: dict[str, float] | Likelihood,
    whitening: float,
    shares: Sequence[float],
) -> tuple[nn.Module, Subspace, Parameters, list[Parameters], dict[str, float] | Likelihood]:
    """The network with inputs u, the space of its candidates, and its target, tangents and weights."""
    first, like = layers[0].weight, target[layers[0].weight]
    x̄, Q = space.offset.flatten().double(), space.basis.flatten(1).double()
    P = _basis(x̄, Q)
    T = target[first].double()
    rows = T.view(len(shares), -1, T.shape[-1]) * T.new_tensor(shares)[:, None, None].sqrt()
    A, inverse = _metric(rows.flatten(0, 1) @ P, whitening)
    outside = T - T @ P @ P.T
    pairs = [(i, part, name) for i, layer in enumerate(layers) for part, name in vars(layer).items() if name]
    own = {name: f"{2 * i}.{part}" for i, part, name in pairs}  # the names in nn.Sequential

    def renamed(values: Mapping[str, Tensor], basis: Tensor, last: Tensor) -> Parameters:
        W = aligned(values[first].double() @ basis, last).to(like)
        return {own[name]: W if name == first else value for name, value in values.items() if name in own}

    points = [renamed(θ, P @ inverse, P.new_zeros(len(θ[first]), 1)) for θ in tangents]
    x̄_u, Q_u = (aligned(rows @ P @ A.T, torch.zeros_like(rows[:, :1])) for rows in (x̄[None], Q))
    network, subspace = _stack(layers, points[0]), Subspace(x̄_u[0], Q_u).to(like.device, like.dtype)
    reduced_target = renamed(target, P @ A.T, outside.norm(dim=-1, keepdim=True))
    if isinstance(weights, Likelihood):  # still one number for each pixel: the residual is the same
        counts = {own[name]: count for name, count in weights.counts.items()}
        return network, subspace, reduced_target, points, replace(weights, counts=counts)
    return network, subspace, reduced_target, points, {own[name]: w for name, w in weights.items()}


def _basis(x̄: Tensor, Q: Tensor) -> Tensor:
    """P: orthonormal columns that span the rows of Q and, unless it lies in their span, x̄."""
    P = torch.linalg.qr(Q.T)[0]
    beyond = x̄ - P @ (P.T @ x̄)
    return torch.cat([P, beyond[:, None] / beyond.norm()], 1) if beyond.norm() > ROUNDING * x̄.norm() else P


def _metric(T: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """A with AᵀA = (TᵀT)^(−p), scaled such that ‖T Aᵀ‖ = ‖T‖, and its inverse."""
    λ, V = torch.linalg.eigh(T.T @ T)
    σ = λ.clamp_min(0).sqrt()
    if p == 0 or not σ.any():
        one = torch.eye(len(σ)).to(T)
        return one, one
    s = σ.clamp_min(SMALLEST * float(σ.max())) ** -p
    s = s * (σ.norm() / (σ * s).norm())
    return s[:, None] * V.T, V / s


def _stack(layers: Sequence[Layer], θ: Parameters) -> nn.Sequential:
    modules: list[nn.Module] = []
    for i, layer in enumerate(layers):
        m, d = θ[f"{2 * i}.weight"].shape
        modules += [nn.utils.skip_init(nn.Linear, d, m, bias=layer.bias is not None), nn.ReLU()]
    stack = nn.Sequential(*modules[:-1]).to(next(iter(θ.values()))).eval().requires_grad_(False)
    stack.load_state_dict(θ)
    return stack
