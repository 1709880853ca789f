"""Gauss–Newton on the samples themselves, their reading in the caller's units, and how noise moves them.

With z_i = |b_i|^{1/α} x_i and signs s_i = ±1 the evaluations are

    f(w_j) = Σ_i s_i t_ji^{α−1} z_i,    p(w_j) = Σ_i s_i t_ji^α,    t_ji = w_j·z_i,

which fixes the scale. The normal matrix JᵀJ is assembled from Gram matrices; J is never formed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.identifiability.interpolation import extreme_singular_values

NORMAL_LIMIT = 4000
"""The largest normal matrix, in unknowns n·d. Larger problems rely on the Newton iteration on T."""

TRUSTED = 1e-7
"""The smallest conditioning of J whose square, that of JᵀJ, double precision still resolves."""


@dataclass(frozen=True)
class Refined:
    """A least-squares fit of the samples."""

    z: Tensor  # |b_i|^{1/α} x_i, (n, d)
    covariance: Tensor | None  # (JᵀJ)^{-1}, (n, d, n, d): that of z for unit noise on every value; None if not computed
    conditioning: float  # smallest over largest singular value of J
    nullity: int  # dimension of the family of samples with the same values, to first order
    converged: bool = True  # whether the iteration converged


def model(points: Tensor, z: Tensor, signs: Tensor, degree: int, *, scalar: bool) -> Tensor:
    """f(w_j) or p(w_j) of the samples z."""
    t = points @ z.T
    return t**degree @ signs if scalar else (t ** (degree - 1)) @ (signs[:, None] * z)


def normal_matrix(points: Tensor, z: Tensor, signs: Tensor, degree: int, *, scalar: bool) -> Tensor:
    """JᵀJ, of shape (n d, n d).

    J δ = Σ_i s_i [(α−1) t_ji^{α−2} (w_j·δ_i) z_i + t_ji^{α−1} δ_i] for f, and Σ_i s_i α t_ji^{α−1} (w_j·δ_i)
    for p.
    """
    (n, d), α = z.shape, degree
    t = points @ z.T
    h = signs * t ** (α - 1)
    if scalar:
        P = (α * h[:, :, None] * points[:, None, :]).flatten(1)
        return P.T @ P
    P = ((α - 1) * signs * t ** (α - 2))[:, :, None] * points[:, None, :]
    PP = (P.flatten(1).T @ P.flatten(1)).reshape(n, d, n, d)
    cross = (P.flatten(1).T @ h).reshape(n, d, n)[..., None] * z[:, None, None, :]  # Σ_j P_j^{ia} h_jk z_i^b
    normal = PP * (z @ z.T)[:, None, :, None] + cross + cross.permute(2, 3, 0, 1)
    normal += (h.T @ h)[:, None, :, None] * torch.eye(d, dtype=z.dtype)[:, None, :]
    return normal.reshape(n * d, n * d)


def weighed(points: Tensor, values: Tensor, z: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """The same directions, with the lengths and signs that fit the values best, from least squares for b_i."""
    x = torch.nn.functional.normalize(z, dim=1)
    t = points @ x.T
    if values.dim() == 1:
        columns, F = t**degree, values[:, None]
    else:
        columns, F = ((t ** (degree - 1))[:, None, :] * x.T).flatten(0, 1), values.reshape(-1, 1)
    b = torch.linalg.lstsq(columns, F, driver="gelsd").solution[:, 0]
    return b.abs().pow(1 / degree)[:, None] * x, b.sign()


def refine(points: Tensor, values: Tensor, z: Tensor, signs: Tensor, degree: int, *, damping: float = 0.0) -> Refined:
    """Minimise Σ_j ‖values_j − f(w_j)‖² from a close start. A large problem keeps its z."""
    if z.numel() > NORMAL_LIMIT:
        return Refined(z, None, torch.nan, 0)
    iterations = 300 if damping else 25
    z, normal, _, converged = least_squares(points, values, z, signs, degree, damping=damping, iterations=iterations)
    scale = z.norm(dim=1, keepdim=True).expand_as(z).flatten()
    scaled = normal * scale[:, None] * scale
    R, failed = torch.linalg.cholesky_ex(scaled, upper=True)
    smallest, largest = (0.0, 1.0) if failed else extreme_singular_values(R)
    if smallest > TRUSTED * largest:
        inverse, nullity = torch.cholesky_inverse(R, upper=True), 0
    else:
        inverse, nullity = _inverse_or_infinity(scaled)
    covariance = inverse * scale[:, None] * scale
    return Refined(z, covariance.reshape(*z.shape, *z.shape), smallest / largest, nullity, converged)


def _inverse_or_infinity(normal: Tensor) -> tuple[Tensor, int]:
    """Inverse of a nearly singular JᵀJ, infinite for unknowns that its null space moves; and its nullity.

    Directions below `TRUSTED` count as undetermined.
    """
    λ, vectors = torch.linalg.eigh(normal)
    loose = λ < TRUSTED**2 * λ[-1]
    inverse = (vectors[:, ~loose] / λ[~loose]) @ vectors[:, ~loose].T
    moved = vectors[:, loose].norm(dim=1) > 1e-6
    inverse.diagonal()[moved] = torch.inf
    return inverse, int((λ < 1e-15 * len(λ) * λ[-1]).sum())


def least_squares(
    points: Tensor, values: Tensor, z: Tensor, signs: Tensor, degree: int, *, damping: float, iterations: int = 25
) -> tuple[Tensor, Tensor, float, bool]:
    """Levenberg–Marquardt, or Gauss–Newton without damping: z, JᵀJ close to it, relative misfit, and convergence.

    JᵀJ is updated only while steps are long. Close to the solution an old one converges as well.
    """
    scalar, size = values.dim() == 1, values.norm()
    best, μ, length = torch.inf, damping, torch.inf
    kept, normal, downhill, R = z, z, z, None
    for _ in range(iterations):
        misfit, extent = float((values - model(points, z, signs, degree, scalar=scalar)).norm() / size), 0.0
        if misfit < best:
            kept, best, extent = z, misfit, float(z.abs().max())
            downhill = slope(points, values, z, signs, degree).reshape(-1, 1)
            if μ or length > 1e-4 * extent:
                normal, R = normal_matrix(points, z, signs, degree, scalar=scalar), None
            μ = μ / 4 if μ > 1e-13 else 0.0
        elif length <= 1e-4 * float(kept.abs().max()) or μ > 1e8 or best == torch.inf:
            break
        else:
            μ, R = max(4 * μ, 1e-6), None
        if length <= 1e-15 * extent:
            break
        if R is None:
            ridge = μ * normal.diagonal().mean() * torch.eye(len(normal), dtype=z.dtype)
            R, failed = torch.linalg.cholesky_ex(normal + ridge, upper=True)
            if failed:
                z, length, R = torch.full_like(kept, torch.nan), torch.inf, None
                continue
        step = torch.cholesky_solve(downhill, R, upper=True).reshape(z.shape)
        z, length = kept + step, float(step.abs().max())
    else:
        return kept, normal, best, False
    return kept, normal, best, True


def slope(points: Tensor, values: Tensor, z: Tensor, signs: Tensor, degree: int) -> Tensor:
    """Jᵀ(values − model), (n, d)."""
    t = points @ z.T
    h = signs * t ** (degree - 1)
    residual = values - model(points, z, signs, degree, scalar=values.dim() == 1)
    if values.dim() == 1:
        return degree * h.T @ (residual[:, None] * points)
    inner = (degree - 1) * signs * t ** (degree - 2) * (residual @ z.T)
    return inner.T @ points + h.T @ residual


def samples_and_weights(
    z: Tensor, signs: Tensor, degree: int, *, bias: bool, norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x_i, b_i and the derivative ∂x_i/∂z_i, of shapes (n, d), (n,) and (n, d, D).

    With a bias, z_i ∝ (x_i, 1), D = d + 1, and the last coordinate gives sign and norm. Without one, D = d, the
    norm is given, and the sign makes the sum of the coordinates positive.
    """
    if bias:
        last = z[:, -1:]
        x = z[:, :-1] / last
        eye = torch.eye(x.shape[1], dtype=z.dtype).expand(len(z), -1, -1)
        return x, signs * last[:, 0] ** degree, torch.cat([eye, -x[:, :, None]], 2) / last[:, :, None]
    length = z.norm(dim=1)
    flip = torch.where(z.sum(1) < 0, -1.0, 1.0).to(z)
    x = (flip / length)[:, None] * z
    tangent = torch.eye(z.shape[1], dtype=z.dtype) - x[:, :, None] * x[:, None, :]
    return norm * x, signs * flip**degree * (length / norm) ** degree, norm * tangent / length[:, None, None]


def propagate(derivative: Tensor, covariance: Tensor, outside: Tensor, embedding: Tensor) -> Tensor:
    """Expected ‖δx_i‖ = √(tr D C Dᵀ), (n,), for independent errors inside and outside the embedded space.

    D = ∂x_i/∂z_i is (n, d, D). The covariance of z_i in the coordinates of the embedding (orthonormal columns, (D, k))
    is (n, k, k), and ``outside``, (n,), is the variance of each coordinate orthogonal to it.
    """
    inside = derivative @ embedding
    hidden = covariance.diagonal(dim1=1, dim2=2).isinf().any(1)
    variance = ((inside @ covariance.nan_to_num(posinf=0.0)) * inside).sum((1, 2))
    variance[hidden] = torch.inf
    rest = derivative.square().sum((1, 2)) - inside.square().sum((1, 2))
    return (variance + outside * rest.clamp(min=0)).sqrt()
