"""From evaluations to the symmetric tensor T: is the linear problem determined, and what solves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.identifiability.polynomials import (
    expand,
    gradient_coefficients,
    monomial_count,
    monomials,
    monomials_jacobian,
    symmetrise,
)

DENSE_LIMIT = 6000
"""Most unknowns of a dense least-squares problem; beyond, it would take minutes."""


@dataclass(frozen=True)
class Interpolant:
    """What the evaluations say about T, whether or not they determine it.

    Attributes:
        tensor: T, full, or None where the evaluations leave it open.
        needed: number of unknowns N.
        rank: rank of the linear system; T is determined when it equals ``needed``.
        conditioning: smallest over largest singular value of the system, 0 where rank-deficient.
        misfit: ‖F − f(W)‖/‖F‖ with the symmetric T; large when the values come from no f at all.
        factor: triangular R of the system, through which noise on the values passes.
    """

    tensor: Tensor | None
    needed: int
    rank: int
    conditioning: float
    misfit: float
    factor: Tensor

    @property
    def nullity(self) -> int:
        return self.needed - self.rank

    def noise_gain(self, u: Tensor) -> Tensor:
        """Root-mean-square error of each coordinate of f(u) per unit of noise on every value, for rows u."""
        assert self.tensor is not None
        d, α = u.shape[1], self.tensor.dim()
        if len(self.factor) == monomial_count(d, α - 1):  # one system, shared by the coordinates
            return _half_solve(self.factor, monomials(u, α - 1).T).norm(dim=0)
        D = monomials_jacobian(u, α) / α
        half = _half_solve(self.factor, D.permute(1, 0, 2).flatten(1)).reshape(-1, len(u), d)
        return half.square().sum((0, 2)).div(d).sqrt()

    def tensor_error(self, noise: float) -> float:
        """Expected ‖δT‖ for noise on every value, where all of T was the unknown: ‖R^{−1}‖ times it."""
        assert self.tensor is not None
        if not len(self.factor):  # a completion is as good as its fit, with room for its conditioning
            return 300 * (noise + self.misfit) * float(self.tensor.norm())
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype)
        return noise * float(torch.linalg.solve_triangular(self.factor, eye, upper=True).norm())


def interpolate(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    """Fit T to f(w_j) (values of shape (m, d)) or to p(w_j) (values of shape (m,)).

    With enough points every coordinate of f is fitted on its own, f(w) = A φ_{α−1}(w), N = C(d+α−2, α−1)
    unknowns each. With fewer, the symmetry of T ties the coordinates: C(d+α−1, α) unknowns in all.
    """
    m, d = points.shape
    if values.dim() == 1:
        return _fit_scalar(points, values, degree)
    symmetric_fits = monomial_count(d, degree) <= min(m * d, DENSE_LIMIT)
    if m >= monomial_count(d, degree - 1) or not symmetric_fits:
        fit = _fit_coordinates(points, values, degree)
        if fit.tensor is not None or not symmetric_fits:
            return fit
    return _fit_symmetric(points, values, degree)


def _fit_coordinates(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    V = monomials(points, degree - 1)
    A, rank, conditioning, R = _least_squares(V, values)
    if A is None:
        return Interpolant(None, V.shape[1], rank, conditioning, torch.nan, R)
    T = symmetrise(A.T, degree)
    misfit = (values - V @ gradient_coefficients(T).T).norm() / values.norm()
    return Interpolant(T, V.shape[1], rank, conditioning, float(misfit), R)


def _fit_symmetric(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    V = (monomials_jacobian(points, degree) / degree).transpose(1, 2).flatten(0, 1)  # f = ∇p/α
    return _fit_tensor(V, values.flatten(), points.shape[1], degree)


def _fit_scalar(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    return _fit_tensor(monomials(points, degree), values, points.shape[1], degree)


def _fit_tensor(V: Tensor, values: Tensor, dimension: int, degree: int) -> Interpolant:
    c, rank, conditioning, R = _least_squares(V, values[:, None])
    if c is None:
        return Interpolant(None, V.shape[1], rank, conditioning, torch.nan, R)
    misfit = (values - V @ c[:, 0]).norm() / values.norm()
    T = expand(c[:, 0], dimension, degree)
    return Interpolant(T, V.shape[1], rank, conditioning, float(misfit), R)


def _least_squares(V: Tensor, F: Tensor) -> tuple[Tensor | None, int, float, Tensor]:
    """Solution (None where not unique), rank, conditioning and R of min ‖V A − F‖ by Householder QR."""
    m, N = V.shape
    tolerance = 10 * max(m, N) * torch.finfo(V.dtype).eps
    if m < N:
        return None, int(torch.linalg.matrix_rank(V, rtol=tolerance)), 0.0, V.new_zeros(0, 0)
    reflectors, τ = torch.geqrf(V)
    R = reflectors[:N].triu()
    smallest, largest = extreme_singular_values(R)
    if smallest <= tolerance * largest:
        return None, int((torch.linalg.svdvals(R) > tolerance * largest).sum()), 0.0, R
    QtF = torch.ormqr(reflectors, τ, F, left=True, transpose=True)[:N]
    return torch.linalg.solve_triangular(R, QtF, upper=True), N, smallest / largest, R


def extreme_singular_values(R: Tensor, *, iterations: int = 8) -> tuple[float, float]:
    """Smallest and largest singular value of a triangular matrix, by inverse and direct power iteration.

    >>> extreme_singular_values(torch.diag(torch.tensor([4.0, 0.125, 1.0])).double())
    (0.125, 4.0)
    """
    if R.diagonal().abs().min() == 0:
        return 0.0, float(torch.linalg.matrix_norm(R, 2))
    R = R.T.contiguous().T  # in Fortran's order, as the solver wants it
    start = torch.randn(len(R), 1, dtype=R.dtype, generator=torch.Generator().manual_seed(0))
    low = high = start / start.norm()
    for _ in range(iterations):
        high = R.T @ (R @ high)
        high = high / high.norm()
        low = torch.linalg.solve_triangular(R, _half_solve(R, low), upper=True)
        low = low / low.norm()
    return float((R @ low).norm()), float((R @ high).norm())


def _half_solve(R: Tensor, right: Tensor) -> Tensor:
    """R^{−T} times the right-hand sides."""
    return torch.linalg.solve_triangular(R.T, right, upper=False)
