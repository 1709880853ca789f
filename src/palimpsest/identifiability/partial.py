"""What is still determined where the whole data set is not.

Two things survive. The rows of the values always lie in the span of the active samples, so every direction
found in them is a direction of that span. And where T is known but does not decompose as a whole, a term that
splits off as a rank-one summand, T(·, ·, u_i, …, u_i) = b_i x_i x_iᵀ with u_i orthogonal to everything else
in T, is returned as a sample, while the rest remains a subspace. (As ever, α samples in one plane can imitate
two.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from palimpsest.identifiability.decomposition import Terms
from palimpsest.identifiability.polynomials import contract


def span(values: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Orthonormal basis (d, r) of the row space of the values above the noise, with a bound each.

    The bound on the sine of the angle between a direction and the span of the samples is Wedin's, ‖E‖/σ_k,
    with ‖E‖ ≤ ε(√m + √d) the size of a noise matrix of standard deviation ε.

    >>> basis, bounds = span(torch.tensor([[3.0, 0.0], [4.0, 0.0]]).double(), 1e-12)
    >>> basis.shape, bool(bounds[0] < 1e-11)
    (torch.Size([2, 1]), True)
    """
    m, d = values.shape
    size = noise * float(values.square().mean().sqrt()) * (m**0.5 + d**0.5)
    _, σ, Vh = torch.linalg.svd(values, full_matrices=False)
    kept = σ > 2 * size
    return Vh[kept].T, size / σ[kept]


def split_off(T: Tensor, terms: Terms) -> Tensor:
    """Relative distance of T(·, ·, u_i, …, u_i) from the rank-one matrix b_i x_i x_iᵀ, per term.

    Zero for a term that shares no direction with the rest of T; of order one inside a block that does not
    decompose.
    """
    defects = []
    for x, b, u in zip(terms.samples, terms.weights, terms.duals, strict=True):
        M = contract(T, *[u / (u @ x)] * (T.dim() - 2))
        defects.append((M - b * torch.outer(x, x)).norm() / b.abs())
    return torch.stack(defects)
