"""From evaluations to the symmetric tensor T: whether the linear problem is determined, and its solution."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from palimpsest.identifiability import polynomials as poly

DENSE_LIMIT = 6000
"""The largest dense least-squares problem, in unknowns. A larger one takes minutes."""

SYMMETRIC_LIMIT = 1600
"""The largest T, in entries, that is fitted at once if its rows could be fitted one by one."""


@dataclass(frozen=True)
class Interpolant:
    """The facts that the evaluations give about T, even if they do not determine it."""

    tensor: Tensor  # T, full; empty if the evaluations do not determine it
    needed: int  # number of unknowns N
    rank: int  # rank of the linear system
    conditioning: float  # smallest over largest singular value of the system, 0 if it is rank-deficient
    misfit: float  # ‖F − f(W)‖/‖F‖ with the symmetric T; it is large if the values do not come from an f
    factor: Tensor  # triangular R of the system, through which noise on the values passes; empty for a completed T

    @property
    def determined(self) -> bool:
        return self.tensor.numel() > 0

    def noise_gain(self, u: Tensor) -> Tensor:
        """Root-mean-square error of each coordinate of f(u) per unit of noise on every value, for rows u."""
        d, α = u.shape[1], self.tensor.dim()
        if self._by_coordinates:
            return _half_solve(self.factor, poly.monomials(u, α - 1).T).norm(dim=0)
        D = poly.monomials_jacobian(u, α) / α
        half = _half_solve(self.factor, D.permute(1, 0, 2).flatten(1)).reshape(-1, len(u), d)
        return half.square().sum((0, 2)).div(d).sqrt()

    def tensor_error(self, noise: float) -> float:
        """Expected ‖δT‖ for noise on every value: noise · ‖R^{−1}‖ for every system that R solves."""
        if not len(self.factor):  # a completion is as good as its fit, with a margin for its conditioning
            return 300 * (noise + self.misfit) * float(self.tensor.norm())
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype)
        systems = self.tensor.shape[0] if self._by_coordinates else 1
        return noise * systems**0.5 * float(torch.linalg.solve_triangular(self.factor, eye, upper=True).norm())

    @property
    def _by_coordinates(self) -> bool:
        """Whether one system was solved for every coordinate of f."""
        return len(self.factor) == poly.monomial_count(self.tensor.shape[0], self.tensor.dim() - 1)


def interpolate(points: Tensor, values: Tensor, degree: int) -> Interpolant:
    """Fit T to f(w_j) (values of shape (m, d)) or to p(w_j) (values of shape (m,)).

    The symmetry of T ties the coordinates of f(w) = A φ_{α−1}(w) together: C(d+α−1, α) unknowns in all, and the least
    noise of all unbiased estimates. If T is large and the points suffice, every coordinate is fitted separately, with
    N = C(d+α−2, α−1) unknowns each, and the result is symmetrised.
    """
    m, d = points.shape
    if values.dim() == 1:
        return _fit_scalar(poly.monomials(points, degree), values, d, degree)
    V, entries = poly.monomials(points, degree - 1), poly.monomial_count(d, degree)
    separable, determined = m >= V.shape[1], entries <= min(m * d, DENSE_LIMIT)
    if not determined or (separable and entries > SYMMETRIC_LIMIT):
        fit = _fit_coordinates(V, values, degree)
        if fit.determined or not determined:
            return fit
    return _fit_symmetric(V, values, degree)


def _fit_scalar(V: Tensor, values: Tensor, dimension: int, degree: int) -> Interpolant:
    c, fit = _least_squares(V, values[:, None])
    if c is None:
        return fit
    misfit = (values - V @ c[:, 0]).norm() / values.norm()
    return replace(fit, tensor=poly.expand(c[:, 0], dimension, degree), misfit=float(misfit))


def _fit_coordinates(V: Tensor, values: Tensor, degree: int) -> Interpolant:
    A, fit = _least_squares(V, values)
    return fit if A is None else _with_tensor(fit, poly.symmetrise(A.T, degree), V, values)


def _fit_symmetric(V: Tensor, values: Tensor, degree: int) -> Interpolant:
    d, rows, targets = values.shape[1], V, values
    if len(V) > V.shape[1]:  # ‖V A − F‖² = ‖R A − QᵀF‖² + a part that does not depend on A
        Q, rows = torch.linalg.qr(V)
        targets = Q.T @ values
    c, fit = _least_squares(_symmetric_system(rows, d, degree), targets.reshape(-1, 1))
    return fit if c is None else _with_tensor(fit, poly.expand(c[:, 0], d, degree), V, values)


def _symmetric_system(rows: Tensor, dimension: int, degree: int) -> Tensor:
    """The matrix of c ↦ rows · A(c)ᵀ, flattened, for the A(c) of the tensor with compressed coefficients c."""
    position = poly.gradient_positions(dimension, degree)
    weight = poly.sqrt_multinomials(dimension, degree - 1) / poly.sqrt_multinomials(dimension, degree)[position]
    system = rows.new_zeros(len(rows), dimension, poly.monomial_count(dimension, degree))
    for a in range(dimension):
        system[:, a, position[a]] = rows * weight[a]
    return system.flatten(0, 1)


def _with_tensor(fit: Interpolant, T: Tensor, V: Tensor, values: Tensor) -> Interpolant:
    misfit = (values - V @ poly.gradient_coefficients(T).T).norm() / values.norm()
    return replace(fit, tensor=T, misfit=float(misfit))


def _least_squares(V: Tensor, F: Tensor) -> tuple[Tensor | None, Interpolant]:
    """The solution of min ‖V A − F‖ by Householder QR, None if it is not unique; and its rank, conditioning and R."""
    m, N = V.shape
    tolerance = 10 * max(m, N) * torch.finfo(V.dtype).eps
    fit = Interpolant(V.new_zeros(0), N, N, 0.0, torch.nan, V.new_zeros(0, 0))
    if m < N:
        return None, replace(fit, rank=int(torch.linalg.matrix_rank(V, rtol=tolerance)))
    reflectors, τ = torch.geqrf(V)
    R = reflectors[:N].triu()
    smallest, largest = extreme_singular_values(R)
    if smallest <= tolerance * largest:
        return None, replace(fit, rank=int((torch.linalg.svdvals(R) > tolerance * largest).sum()), factor=R)
    QtF = torch.ormqr(reflectors, τ, F, left=True, transpose=True)[:N]
    A = torch.linalg.solve_triangular(R, QtF, upper=True)
    return A, replace(fit, conditioning=smallest / largest, factor=R)


def extreme_singular_values(R: Tensor, *, iterations: int = 8) -> tuple[float, float]:
    """Smallest and largest singular value of a triangular matrix, by inverse and direct power iteration."""
    if R.diagonal().abs().min() == 0:
        return 0.0, float(torch.linalg.matrix_norm(R, 2))
    R = R.T.contiguous().T  # in Fortran's order, which the solver needs
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
