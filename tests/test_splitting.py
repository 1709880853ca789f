"""The splitting matrix, its eigenvalues, and what a split does."""

import brute_force
import pytest
import torch
from cases import Case

from palimpsest import splitting


def test_matrix_is_symmetric_and_equals_finite_differences(case: Case):
    S = splitting.matrix(case.objective, *case.arguments)
    assert (S - S.mT).norm() <= 1e-12 * S.norm()
    expected = brute_force.splitting_matrix(case.objective, *case.arguments)
    assert (S - expected).norm() <= 1e-6 * expected.norm()
    assert S.norm() > 0


def test_lanczos_to_full_dimension_equals_eigh(case: Case):
    S = splitting.matrix(case.objective, *case.arguments)
    exact = torch.linalg.eigvalsh(S)
    values, vectors = splitting.min_eigenpairs(case.objective, *case.arguments, iterations=case.x[0].numel())
    scale = exact.abs().amax()
    assert (values - exact[:, 0]).abs().max() <= 1e-8 * scale
    v = vectors.flatten(1)
    assert torch.allclose(v.norm(dim=1), torch.ones(len(v), dtype=v.dtype))
    assert ((S @ v[:, :, None])[:, :, 0] - values[:, None] * v).norm(dim=1).max() <= 1e-6 * scale
