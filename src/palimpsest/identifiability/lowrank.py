"""T from fewer scalar evaluations than it has entries, because it has few terms.

Tensors with at most k terms form a family of dimension k·d, and their differences one of dimension 2k·d. For almost all
points, 2k·d evaluations p(w_j) admit only one such tensor. Levenberg–Marquardt from a random start fits *more* terms
than there are samples,

    p(w_j) = Σ_{i≤k} s_i (z_i·w_j)^α.

Surplus terms keep the fit out of bad minima. A fit without residual is T, however its terms divide the samples.
"""

import torch
from torch import Tensor

from palimpsest.identifiability.interpolation import Interpolant
from palimpsest.identifiability.polynomials import distinct_directions, power_sum
from palimpsest.identifiability.refinement import NORMAL_LIMIT, least_squares, model


def complete(points: Tensor, values: Tensor, degree: int, *, seed: int = 0) -> tuple[Tensor, Interpolant]:
    """Basis (d, k) of the span of the fitted terms, and T on it, which stays open if evaluations are too few."""
    m, d = points.shape
    k = min(distinct_directions(points) // 3, NORMAL_LIMIT // 2) // d  # a third of the evaluations remains as a check
    nothing = points.new_zeros(0, 0)
    if k == 0:
        open_ = Interpolant(points.new_zeros(0), 2 * d, min(m, 2 * d - 1), 0.0, torch.nan, nothing)
        return torch.eye(d, dtype=points.dtype), open_
    signs = points.new_ones(k)
    if degree % 2 == 0:  # an even power cannot absorb the sign of its weight
        signs[1::2] = -1
    z, misfit = min((_fit(points, values, signs, degree, seed + s) for s in range(2)), key=lambda fit: fit[1])
    basis = torch.linalg.svd(z.T, full_matrices=False)[0]
    T = power_sum(z @ basis, signs, degree)
    return basis, Interpolant(T, 2 * k * d, 2 * k * d, 1.0, misfit, nothing)


def _fit(points: Tensor, values: Tensor, signs: Tensor, degree: int, seed: int) -> tuple[Tensor, float]:
    """Terms fitted from a random start of half the size of the values, and the relative misfit."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(len(signs), points.shape[1], generator=generator, dtype=points.dtype)
    z *= 0.5 * float(values.norm() / model(points, z, signs, degree, scalar=True).norm()) ** (1 / degree)
    z, _, misfit, _ = least_squares(points, values, z, signs, degree, damping=1.0, iterations=400)
    return z, misfit
