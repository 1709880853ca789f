"""Whitening: directions in which a layer's weights changed much count less.

Let T be the change of a layer's weights, as a matrix with a row for each entry of their first axis, and r its residual.
The singular values σ of T fall off steeply, because training learns many times over what images have in common. The
last ones hardly change the loss, but they distinguish images. The error of the linearised network falls off with them,
so by generalised least squares each direction should count by the inverse of its own error:

    L = Σ w ‖H r‖²,   H r = c B r A,   B = (TTᵀ)^(−p/4),  A = (TᵀT)^(−p/4)

With p = 0 the loss does not change. With p = 1 all directions count alike: the singular values of H T are in proportion
to σ^(1−p). c is such that ‖H T‖ = ‖T‖. Directions with σ below `SMALLEST` of the largest count as if it were that
large. These are most of them, so B and A take few numbers.

Several targets share a metric: TTᵀ and TᵀT are then Σ_j T_jT_jᵀ/‖T_j‖² and Σ_j T_jᵀT_j/‖T_j‖². Vectors, such as biases,
are left as they are. Within the span of a dense network, :mod:`palimpsest.objectives.reduced` whitens the inputs of the
first layer instead. That does not cost anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from palimpsest.objectives.autograd import Parameters

SMALLEST = 1e-2  # of the largest singular value


@dataclass(frozen=True)
class Side:
    """1 − U diag(g) Uᵀ: the directions U count less than all others."""

    U: Tensor  # (d, q), orthonormal columns
    g: Tensor  # (q,)

    @classmethod
    def of(cls, X: Tensor, power: float) -> Side:
        """In proportion to (XXᵀ)^(−power/2), for X of shape (d, N)."""
        short = X @ X.T if len(X) <= X.shape[1] else X.T @ X
        λ, U = torch.linalg.eigh(short)
        σ = λ.clamp_min(0).sqrt()
        kept = σ > SMALLEST * σ.max()
        σ, U = σ[kept], U[:, kept]
        U = U if len(X) <= X.shape[1] else X @ U / σ
        return cls(U, 1 - (σ / (SMALLEST * σ.max())) ** -power)

    def __call__(self, t: Tensor) -> Tensor:
        """Times t (…, d, n)."""
        return t - self.U @ (self.g[:, None] * (self.U.T @ t))

    @property
    def squared(self) -> Side:
        return replace(self, g=self.g * (2 - self.g))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Side:
        return Side(self.U.to(device, dtype), self.g.to(device, dtype))


@dataclass(frozen=True)
class Metric:
    """H of one layer."""

    B: Side
    A: Side
    c: float

    def __call__(self, r: Tensor) -> Tensor:
        """H r, for r of the shape of the layer's weights, or with a first axis for several targets."""
        rows = r.reshape(-1, len(self.B.U), len(self.A.U))
        return (self.c * self.A(self.B(rows).mT).mT).view_as(r)

    @property
    def squared(self) -> Metric:
        """H H."""
        return Metric(self.B.squared, self.A.squared, self.c**2)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Metric:
        return Metric(self.B.to(device, dtype), self.A.to(device, dtype), self.c)


def metrics(target: Parameters, shares: Sequence[float], *, several: bool, p: float) -> dict[str, Metric]:
    """The metric of each layer with a matrix of weights. ``several`` targets have a first axis, and these shares."""
    found = {}
    for name, T in target.items():
        Ts = (T if several else T[None]).double()
        if Ts[0].ndim < 2 or min(Ts[0].flatten(1).shape) == 1 or not bool(Ts.any()):
            continue
        scaled = Ts.flatten(2) * Ts.new_tensor(shares).sqrt()[:, None, None]
        B = Side.of(scaled.transpose(0, 1).flatten(1), p / 2)
        A = Side.of(scaled.flatten(0, 1).T, p / 2)
        one = Metric(B, A, 1.0)
        c = float(scaled.norm() / one(scaled).norm())
        found[name] = replace(one, c=c).to(T.device, T.dtype)
    return found
