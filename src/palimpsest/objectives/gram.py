"""A step of dense layers that never forms the residual, for few candidates in wide layers.

The residual R_l = w(T_l − V_l), V_l = Σ_i δ_i h_iᵀ, is wanted only in products, and V_l has rank k. So

    R_l h_j  = wT_l h_j  − w Σ_i ⟨h_i, h_j⟩ δ_i,        R_lᵀ δ_j = wT_lᵀ δ_j − w Σ_i ⟨δ_i, δ_j⟩ h_i,

which takes Gram matrices, k × k, in place of V_l. What is left to multiply by, T_l, is known beforehand: it is stacked
with W_l, which meets the same factors, and two products become one of twice the size. The rest is as in
:mod:`palimpsest.objectives.dense`, whose symbols these are. Several tangent nodes are as many times the candidates,
except in the first layer: there they share x, and all that is linear in δ_1 is done once for their sum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsest.objectives.dense import Layer, Scalar, Top, bent, rectified
from palimpsest.objectives.factor import Factor

Parameters = Mapping[str, Tensor]


def pays(layers: Sequence[Layer], target: Parameters, candidates: int) -> bool:
    """Whether the Gram matrices of so many candidates, in all nodes, take fewer multiplications than the V_l.

    In double precision the residual is formed all the same: where it vanishes, as at an exact solution, so does then
    every product with it, to the last digit.
    """
    shapes = [target[layer.weight].shape for layer in layers[:-1]]
    if target[layers[0].weight].dtype == torch.float64:
        return False
    return sum(2 * candidates * (m + d) for m, d in shapes) < sum(m * d for m, d in shapes)


class GramStep:
    """The gradients of L for a stack of at least two dense layers.

    Args:
        layers: what :func:`palimpsest.objectives.dense.recognise` returned.
        tangents: θ_s of each node.
        target: T.
        weights: w by parameter name.
        candidates: how many there will be.
        kind: how the output layer is differentiated.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        tangents: Sequence[Parameters],
        target: Parameters,
        weights: Mapping[str, float],
        candidates: int,
        kind: type[Top],
    ) -> None:
        self._kind = kind
        first, *inner = layers[:-1]
        self._first = _First(first, tangents, target, weights, candidates)
        self._inner = [[_Inner(layer, θ, target, weights, candidates) for layer in inner] for θ in tangents]
        self._last = _Last(layers[-1], tangents, target, weights)

    def pulls(self, x: Tensor, λs: Sequence[Tensor], scalar: Scalar, β: float | Tensor | None) -> tuple[Tensor, Tensor]:
        """(x̄, λ̄) for the multipliers of each node; λ̄ keeps a node axis where there are several."""
        *zs, ż_1 = self._first.down(x)
        nodes = [self._forward_and_back(s, z, λ, scalar, β) for s, (z, λ) in enumerate(zip(zs, λs, strict=True))]
        δ_1 = functools.reduce(torch.add, [node.δ[0] for node in nodes])
        ż_1.addmm_(self._first.gram_of_inputs(x), δ_1, alpha=-1)
        for j, layer in enumerate(self._inner[0]):
            layer.take_off_explained(nodes, j)
        R = self._last.residual([node.h[-1] for node in nodes], [node.δ[-1] for node in nodes])
        z̄_1, λ̄ = zip(*(self._adjoint(s, node, ż_1, R, β) for s, node in enumerate(nodes)), strict=True)
        x̄ = self._first.back(z̄_1, δ_1).addmm_(self._first.gram_of_slopes(δ_1), x, alpha=-1)
        return x̄, λ̄[0] if len(λ̄) == 1 else torch.stack(λ̄, 1)

    def _forward_and_back(self, s: int, z: Tensor, λ: Tensor, scalar: Scalar, β: float | Tensor | None) -> _Node:
        hidden, Th = [rectified(z, β)], []
        for layer in self._inner[s]:
            z, Th_l = layer.down(hidden[-1][0])
            hidden.append(rectified(z, β))
            Th.append(Th_l)
        h, slope = map(list, zip(*hidden, strict=True))
        top = self._kind(self._last.outputs(s, h[-1]), λ, scalar)
        up = [top.δ @ self._last.W[s]]
        δ = [up[0] * slope[-1], top.δ]
        Tδ: list[Tensor] = []
        for layer, slope_l in zip(self._inner[s][::-1], slope[-2::-1], strict=True):
            u, Tδ_l = layer.up(δ[0])
            up, δ, Tδ = [u, *up], [u * slope_l, *δ], [Tδ_l, *Tδ]
        return _Node(h, slope, Th, up, δ, Tδ, top)

    def _adjoint(
        self, s: int, node: _Node, ż_1: Tensor, R: tuple[Tensor, Tensor | None], β: float | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """z̄_1 and λ̄ of one node."""
        ż, inner = [ż_1], self._inner[s]
        for j, layer in enumerate(inner):
            ż.append(layer.W.onto(node.Th[j], node.slope[j] * ż[j]))
        Φ̇ = F.linear(node.h[-1], *R).addmm_(node.slope[-1] * ż[-1], self._last.W[s].T)
        z̄, λ̄ = node.top.adjoint(Φ̇)
        h̄ = node.δ[-1] @ R[0]
        h̄ = h̄ if z̄ is None else h̄.addmm_(z̄, self._last.W[s])
        for j in range(len(inner) - 1, -1, -1):
            z̄ = bent(h̄, node.slope[j + 1], node.up[j + 1], ż[j + 1], β)
            h̄ = inner[j].W_T.onto(node.Tδ[j], z̄)
        return bent(h̄, node.slope[0], node.up[0], ż_1, β), λ̄


@dataclass(frozen=True)
class _Node:
    """One tangent node's forward and backward pass; h, slope and up of the hidden layers, δ of all."""

    h: list[Tensor]
    slope: list[Tensor]
    Th: list[Tensor]  # wT_l h_{l−1} of the inner layers
    up: list[Tensor]
    δ: list[Tensor]
    Tδ: list[Tensor]  # wT_lᵀ δ_l of the inner layers
    top: Top


class _Layer:
    """A layer but the last, and its Gram matrices: what V_l does to h and δ, weighted by w as R_l is."""

    def __init__(self, layer: Layer, weights: Mapping[str, float]) -> None:
        self._w, self._w_b = weights[layer.weight], weights[layer.bias] if layer.bias else 0.0

    def _stacked(self, layer: Layer, tangents: Sequence[Parameters], target: Parameters) -> Tensor:
        """[W_l; …; wT_l]: whatever meets the one meets the other."""
        return torch.cat([*(θ[layer.weight] for θ in tangents), self._w * target[layer.weight]])

    def _stacked_bias(self, layer: Layer, tangents: Sequence[Parameters], target: Parameters) -> Tensor | None:
        if layer.bias is None:
            return None
        return torch.cat([*(θ[layer.bias] for θ in tangents), self._w_b * target[layer.bias]])

    def gram_of_inputs(self, h: Tensor) -> Tensor:
        """w ⟨h_i, h_j⟩; a bias is the weight of an input that is always 1."""
        G = self._weighted(h @ h.T)
        return G.add_(self._w_b) if self._w_b else G

    def gram_of_slopes(self, δ: Tensor) -> Tensor:
        """w ⟨δ_i, δ_j⟩."""
        return self._weighted(δ @ δ.T)

    def _weighted(self, gram: Tensor) -> Tensor:
        return gram if self._w == 1 else gram.mul_(self._w)


class _First(_Layer):
    """The first layer of all nodes, which share its input."""

    def __init__(
        self,
        layer: Layer,
        tangents: Sequence[Parameters],
        target: Parameters,
        weights: Mapping[str, float],
        rows: int,
    ) -> None:
        super().__init__(layer, weights)
        stacked = self._stacked(layer, tangents, target)
        self._parts = len(tangents) + 1
        self._down = Factor(stacked.T, self._stacked_bias(layer, tangents, target), rows=rows)
        self._back = Factor(stacked, rows=rows)

    def down(self, x: Tensor) -> Sequence[Tensor]:
        """z_1 of each node, and wT_1 x."""
        return self._down(x).chunk(self._parts, 1)

    def back(self, z̄: Sequence[Tensor], δ: Tensor) -> Tensor:
        """Σ_s W_1ᵀ z̄_s + wT_1ᵀ δ."""
        return self._back(torch.cat([*z̄, δ], 1))


class _Inner(_Layer):
    """A further layer of one node."""

    def __init__(
        self, layer: Layer, θ: Parameters, target: Parameters, weights: Mapping[str, float], rows: int
    ) -> None:
        super().__init__(layer, weights)
        W, stacked = θ[layer.weight], self._stacked(layer, [θ], target)
        self._down = Factor(stacked.T, self._stacked_bias(layer, [θ], target), rows=rows)
        self._up = Factor(torch.cat(stacked.chunk(2), 1), rows=rows)
        self.W, self.W_T = Factor(W.T, rows=rows), Factor(W, rows=rows)

    def down(self, h: Tensor) -> Sequence[Tensor]:
        """z_l and wT_l h."""
        return self._down(h).chunk(2, 1)

    def up(self, δ: Tensor) -> Sequence[Tensor]:
        """u_{l−1} = W_lᵀ δ and wT_lᵀ δ."""
        return self._up(δ).chunk(2, 1)

    def take_off_explained(self, nodes: Sequence[_Node], j: int) -> None:
        """Make R_l h of wT_l h, and R_lᵀ δ of wT_lᵀ δ, in place, in every node."""
        H, Δ = _joined([node.h[j] for node in nodes]), _joined([node.δ[j + 1] for node in nodes])
        G, D = self.gram_of_inputs(H).chunk(len(nodes)), self.gram_of_slopes(Δ).chunk(len(nodes))
        for s, node in enumerate(nodes):
            node.Th[j].addmm_(G[s], Δ, alpha=-1)
            node.Tδ[j].addmm_(D[s], H, alpha=-1)


class _Last:
    """The last layer has few outputs: its residual is small, and is formed."""

    def __init__(
        self, layer: Layer, tangents: Sequence[Parameters], target: Parameters, weights: Mapping[str, float]
    ) -> None:
        self.W = [θ[layer.weight] for θ in tangents]
        self._b = [θ[layer.bias] if layer.bias else None for θ in tangents]
        self._T, self._w = target[layer.weight], weights[layer.weight]
        self._T_b: Tensor | None = target[layer.bias] if layer.bias else None
        self._w_b = weights[layer.bias] if layer.bias else 0.0

    def outputs(self, s: int, h: Tensor) -> Tensor:
        return F.linear(h, self.W[s], self._b[s])

    def residual(self, h: Sequence[Tensor], δ: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """R_L, and that of the bias."""
        Δ = _joined(δ)
        R = self._w * torch.addmm(self._T, Δ.T, _joined(h), alpha=-1)
        return R, None if self._T_b is None else self._w_b * (self._T_b - Δ.sum(0))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
