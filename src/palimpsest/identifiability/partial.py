"""Parts of the dataset that are determined even if the whole is not.

- The rows of the values always lie in the span of the active samples, so their directions are directions of that span.
- T may be known without being a sum of r independent terms, for r the dimension of its span. A term can then split off
  as a rank-one summand, T(·, ·, u_i, …, u_i) = b_i x_i x_iᵀ with u_i orthogonal to everything else in T. It is one of
  the samples if no more than r + 1 are active, as `docs/identifiability.md` proves.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from palimpsest.identifiability.decomposition import Terms, random_slices
from palimpsest.identifiability.polynomials import contract


class SampleSpan(NamedTuple):
    """Orthonormal basis (d, r) of the span of the samples, and a bound on the error of each direction, (r,)."""

    basis: Tensor
    bounds: Tensor

    @property
    def dimension(self) -> int:
        return self.basis.shape[1]


def span(values: Tensor, noise: float) -> SampleSpan:
    """The row space of the values above the noise.

    The bound on the sine of the angle between a direction and the span of the samples is Wedin's, ‖E‖/σ_k,
    with ‖E‖ ≤ ε(√m + √d) the size of a noise matrix of standard deviation ε.
    """
    m, d = values.shape
    size = noise * float(values.square().mean().sqrt()) * (m**0.5 + d**0.5)
    _, σ, Vh = torch.linalg.svd(values, full_matrices=False)
    kept = σ > 2 * size
    return SampleSpan(Vh[kept].T, size / σ[kept])


def split_off(T: Tensor, terms: Terms) -> Tensor:
    """Relative distance of T(·, ·, u_i, …, u_i) from the rank-one matrix b_i x_i x_iᵀ, per term.

    It is zero for a term that shares no direction with the rest of T, and of order one inside a block that does not
    decompose.
    """
    defects = []
    for x, b, u in zip(terms.samples, terms.weights, terms.duals, strict=True):
        M = contract(T, *[u / (u @ x)] * (T.dim() - 2))
        defects.append((M - b * torch.outer(x, x)).norm() / b.abs())
    return torch.stack(defects)


def is_indecomposable(T: Tensor, error: float, *, seed: int = 0) -> bool:
    """Whether certainly no tensor within ``error`` of T is a sum of r independent real terms, for T of size r.

    The matrices X_k = M_0^{−1} M_k of such a sum, for slices M_k, commute and have real eigenvalues. An error E on
    T moves X_k by δ_k ≤ ‖E‖(1 + ‖X_k‖)/(σ_min(M_0) − ‖E‖) and their commutator by at most
    2(‖X_1‖δ_2 + ‖X_2‖δ_1 + δ_1 δ_2). By Bauer and Fike it moves the eigenvalues of X_1 by κδ_1, κ the condition of
    its eigenvectors. However discs of that radius overlap, they reach the real axis from at most 2rκδ_1 away.
    """
    M = random_slices(T, 1, 12, seed)
    smallest = torch.linalg.svdvals(M)[:, -1]
    base = int(smallest.argmax())
    room = float(smallest[base]) - error
    others = [k for k in range(len(M)) if k != base][:2]
    if room <= 0 or len(T) < 2:
        return False
    X, Y = torch.linalg.solve(M[base], M[others])
    x, y = (float(torch.linalg.matrix_norm(Z, 2)) for Z in (X, Y))
    δx, δy = (error * (1 + size) / room for size in (x, y))
    if torch.linalg.matrix_norm(X @ Y - Y @ X, 2) > 2 * (x * δy + y * δx + δx * δy):
        return True
    eigenvalues, vectors = torch.linalg.eig(X)
    return bool(eigenvalues.imag.abs().max() > 2 * len(T) * torch.linalg.cond(vectors) * δx)
