"""From evaluations to the symmetric tensor T: is the linear problem determined, and what solves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.identifiability.polynomials import (
    expand,
    gradient_coefficients,
    gradient_positions,
    monomial_count,
    monomials,
    monomials_jacobian,
    sqrt_multinomials,
    symmetrise,
)

DENSE_LIMIT = 6000
"""Most unknowns of a dense least-squares problem; beyond, it would take minutes."""

SYMMETRIC_LIMIT = 1600
"""Most entries of T that are fitted all at once where its rows could be fitted one by one; beyond, it takes seconds."""


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
        if self._by_coordinates:
            return _half_solve(self.factor, monomials(u, α - 1).T).norm(dim=0)
        D = monomials_jacobian(u, α) / α
        half = _half_solve(self.factor, D.permute(1, 0, 2).flatten(1)).reshape(-1, len(u), d)
        return half.square().sum((0, 2)).div(d).sqrt()

    def tensor_error(self, noise: float) -> float:
        """Expected ‖δT‖ for noise on every value: ‖R^{−1}‖ times it, once for every system that R was shared by."""
        assert self.tensor is not None
        if not len(self.factor):  # a completion is as good as its fit, with room for its conditioning
            return 300 * (noise + self.misfit) * float(self.tensor.norm())
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype)
        systems = self.tensor.shape[0] if self._by_coordinates else 1
        return noise * systems**0.5 * float(torch.linalg.solve_triangular(self.factor, eye, upper=True).norm())

    @property
    def _by_coordinates(self) -> bool:
        """Whether one system was solved for every coordinate of f."""
        assert self.tensor is not None
        return len(self.factor) == monomial_count(self.tensor.shape[0], self.tensor.dim() - 1)


def interpolate(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    """Fit T to f(w_j) (values of shape (m, d)) or to p(w_j) (values of shape (m,)).

    The symmetry of T ties the coordinates of f(w) = A φ_{α−1}(w) together: C(d+α−1, α) unknowns in all, and of
    all unbiased estimates the one with the least noise. Only where T is large, and the points are enough for it,
    is every coordinate fitted on its own, with N = C(d+α−2, α−1) unknowns each, and the result symmetrised.
    """
    m, d = points.shape
    if values.dim() == 1:
        return _fit_scalar(points, values, degree)
    V, entries = monomials(points, degree - 1), monomial_count(d, degree)
    separable, determined = m >= V.shape[1], entries <= min(m * d, DENSE_LIMIT)
    if not determined or (separable and entries > SYMMETRIC_LIMIT):
        fit = _fit_coordinates(V, values, degree)
        if fit.tensor is not None or not determined:
            return fit
    return _fit_symmetric(V, values, degree)


def _fit_coordinates(V: Tensor, values: Tensor, degree: int) -> Interpolant:
    A, rank, conditioning, R = _least_squares(V, values)
    if A is None:
        return Interpolant(None, V.shape[1], rank, conditioning, torch.nan, R)
    T = symmetrise(A.T, degree)
    return Interpolant(T, V.shape[1], rank, conditioning, _misfit(T, V, values), R)


def _fit_symmetric(V: Tensor, values: Tensor, degree: int) -> Interpolant:
    d, rows, targets = values.shape[1], V, values
    if len(V) > V.shape[1]:  # ‖V A − F‖² = ‖R A − QᵀF‖² + what no A can change
        Q, rows = torch.linalg.qr(V)
        targets = Q.T @ values
    c, rank, conditioning, R = _least_squares(_symmetric_system(rows, d, degree), targets.reshape(-1, 1))
    if c is None:
        return Interpolant(None, monomial_count(d, degree), rank, conditioning, torch.nan, R)
    T = expand(c[:, 0], d, degree)
    return Interpolant(T, len(c), rank, conditioning, _misfit(T, V, values), R)


def _symmetric_system(rows: Tensor, dimension: int, degree: int) -> Tensor:
    """The matrix of c ↦ rows · A(c)ᵀ, flattened, for the A(c) of the tensor with compressed coefficients c."""
    position = gradient_positions(dimension, degree)
    weight = sqrt_multinomials(dimension, degree - 1) / sqrt_multinomials(dimension, degree)[position]
    system = rows.new_zeros(len(rows), dimension, monomial_count(dimension, degree))
    for a in range(dimension):
        system[:, a, position[a]] = rows * weight[a]
    return system.flatten(0, 1)


def _misfit(T: Tensor, V: Tensor, values: Tensor) -> float:
    return float((values - V @ gradient_coefficients(T).T).norm() / values.norm())


def _fit_scalar(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    V = monomials(points, degree)
    c, rank, conditioning, R = _least_squares(V, values[:, None])
    if c is None:
        return Interpolant(None, V.shape[1], rank, conditioning, torch.nan, R)
    misfit = (values - V @ c[:, 0]).norm() / values.norm()
    return Interpolant(expand(c[:, 0], points.shape[1], degree), V.shape[1], rank, conditioning, float(misfit), R)


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
