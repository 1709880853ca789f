"""Dense layers within a subspace: the same objective for a network with fewer inputs.

Candidates x = x̄ + Qc reach a dense first layer as W_1 x, and explain Σ_i δ_i x_iᵀ of T_1. Let P be an orthonormal basis
of span{x̄, Q}, and A any invertible matrix. The network that is shown u = A Pᵀx, with W_1 P A⁻¹ for its first layer,
computes the same outputs, and of the target T_1 P Aᵀ its candidates leave

    T_1 P Aᵀ − Σ_i δ_i u_iᵀ = (T_1 − Σ_i δ_i x_iᵀ) P Aᵀ.

With A = 1 that is the residual as it was, in as many columns as the subspace has dimensions, not as there are pixels.
The part of T_1 outside the subspace, which no candidate explains, is one more column, of an input that is always 0.

**Whitening** takes AᵀA = (PᵀT_1ᵀT_1P)^(−p). The singular values of T_1 fall off steeply, for what images have in common
is learnt many times over. To the loss the last of them hardly matter, yet it is they that tell images apart. What the
linearised network cannot explain falls off with them, so by generalised least squares each direction should count by
the inverse of its own error. With p = 0 the loss is as it was, with p = 1 all directions count alike. A is scaled such
that ‖T_1‖ stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from palimpsest.objectives.dense import Layer, aligned
from palimpsest.objectives.spaces import Subspace

Parameters = dict[str, Tensor]
NOTHING = 1e-6  # of the offset: so much of it beyond the subspace is rounding
LEAST = 1e-4  # of the largest singular value of T_1: below it there is nothing but rounding to be magnified


@dataclass(frozen=True)
class Reduction:
    """The smaller network, what its parameters stand for, and the space of its candidates."""

    network: nn.Module
    target: Parameters
    tangents: list[Parameters]
    weights: dict[str, float]
    space: Subspace


def reduce(
    layers: Sequence[Layer],
    space: Subspace,
    target: Parameters,
    tangents: Sequence[Parameters],
    weights: Mapping[str, float],
    whitening: float,
) -> Reduction:
    """The objective of these dense layers, with candidates in ``space``, as one of coordinates u."""
    first, like = layers[0].weight, target[layers[0].weight]
    x̄, Q = space.offset.flatten().double(), space.basis.flatten(1).double()
    P = _basis(x̄, Q)
    A, inverse = _metric(target[first].double() @ P, whitening)
    outside = target[first].double() - target[first].double() @ P @ P.T
    own = {name: own for number, layer in enumerate(layers) for name, own in _names(layer, number)}

    def renamed(values: Mapping[str, Tensor], basis: Tensor, last: Tensor) -> Parameters:
        W = aligned(values[first].double() @ basis, last).to(like)
        return {own[name]: W if name == first else value for name, value in values.items()}

    points = [renamed(θ, P @ inverse, torch.zeros_like(outside[:, :1])) for θ in tangents]
    x̄_u, Q_u = (aligned(rows @ P @ A.T, torch.zeros_like(rows[:, :1])) for rows in (x̄[None], Q))
    return Reduction(
        _stack(layers, points[0]),
        renamed(target, P @ A.T, outside.norm(dim=1, keepdim=True)),
        points,
        {own[name]: w for name, w in weights.items()},
        Subspace(x̄_u[0], Q_u).to(like.device, like.dtype),
    )


def _basis(x̄: Tensor, Q: Tensor) -> Tensor:
    """P: orthonormal columns that span the rows of Q and, unless it lies among them, x̄."""
    P = torch.linalg.qr(Q.T)[0]
    beyond = x̄ - P @ (P.T @ x̄)
    return torch.cat([P, beyond[:, None] / beyond.norm()], 1) if beyond.norm() > NOTHING * x̄.norm() else P


def _metric(T: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """A with AᵀA = (TᵀT)^(−p), scaled such that ‖T Aᵀ‖ = ‖T‖, and its inverse."""
    λ, V = torch.linalg.eigh(T.T @ T)
    σ = λ.clamp_min(0).sqrt()
    if p == 0 or not σ.any():
        one = torch.eye(len(σ)).to(T)
        return one, one
    s = σ.clamp_min(LEAST * float(σ.max())) ** -p
    s = s * (σ.norm() / (σ * s).norm())
    return s[:, None] * V.T, V / s


def _names(layer: Layer, number: int) -> list[tuple[str, str]]:
    """Names in the original network and in the stack."""
    place = str(2 * number)
    return [(layer.weight, f"{place}.weight"), *([(layer.bias, f"{place}.bias")] if layer.bias else [])]


def _stack(layers: Sequence[Layer], θ: Parameters) -> nn.Sequential:
    modules: list[nn.Module] = []
    for number, layer in enumerate(layers):
        m, d = θ[dict(_names(layer, number))[layer.weight]].shape
        modules += [nn.utils.skip_init(nn.Linear, d, m, bias=layer.bias is not None), nn.ReLU()]
    stack = nn.Sequential(*modules[:-1]).to(next(iter(θ.values()))).eval().requires_grad_(False)
    stack.load_state_dict(θ)
    return stack
