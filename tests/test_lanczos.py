"""Batched Lanczos against dense eigenvalues, also where the Krylov space ends early."""

import pytest
import torch

from palimpsest.solver.lanczos import smallest_eigenpairs


def symmetric(k: int, d: int, seed: int = 0) -> torch.Tensor:
    A = torch.randn(k, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.mT


def test_full_length_is_exact_and_short_is_an_upper_bound_with_a_valid_error():
    A = symmetric(5, 30)
    exact = torch.linalg.eigvalsh(A)
    product = lambda v: torch.einsum("kij,kj->ki", A, v)  # noqa: E731
    full = smallest_eigenpairs(product, A[:, 0], iterations=100)
    assert torch.allclose(full.values, exact[:, 0], atol=1e-10)
    short = smallest_eigenpairs(product, A[:, 0], iterations=6)
    assert (short.values >= exact[:, 0] - 1e-12).all()
    nearest = (exact - short.values[:, None]).abs().min(1).values
    assert (nearest <= short.residuals + 1e-10).all()
    true_residuals = (product(short.vectors) - short.values[:, None] * short.vectors).norm(dim=1)
    assert torch.allclose(true_residuals, short.residuals, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_breakdown_is_survived_by_each_operator_on_its_own(dtype):
    """A zero operator, the identity, rank one, few distinct eigenvalues and a full one, all in one batch."""
    d = 12
    full = symmetric(1, d)[0]
    u = torch.linalg.qr(full)[0][:, :1]
    few = u @ u.T * -5 + torch.eye(d)
    A = torch.stack([torch.zeros(d, d), torch.eye(d), -3 * u @ u.T, few, full]).to(dtype)
    found = smallest_eigenpairs(lambda v: torch.einsum("kij,kj->ki", A, v), A[:, 0], iterations=d)
    assert found.values.isfinite().all()
    assert found.vectors.isfinite().all()
    assert torch.allclose(
        found.values.double(),
        torch.linalg.eigvalsh(A.double())[:, 0],
        atol=1e-5 if dtype == torch.float32 else 1e-10,
    )


def test_the_answer_does_not_depend_on_the_place_in_the_batch():
    A = symmetric(4, 20)
    order = torch.tensor([2, 0, 3, 1])
    values = [
        smallest_eigenpairs(lambda v, M=M: torch.einsum("kij,kj->ki", M, v), M[:, 0], iterations=5).values
        for M in (A, A[order])
    ]
    assert torch.allclose(values[1], values[0][order])


def test_single_precision_in_many_dimensions_is_not_taken_for_a_breakdown():
    """A spectrum as narrow as 1 ± 0.005 in a hundred thousand dimensions."""
    diagonal = torch.linspace(0.995, 1.005, 100_000)[None]
    found = smallest_eigenpairs(lambda v: diagonal * v, diagonal, iterations=20)
    assert float(found.values) < 0.9965
    assert float((diagonal * found.vectors - found.values[:, None] * found.vectors).norm()) <= 1.01 * float(
        found.residuals
    )


def test_one_dimension():
    found = smallest_eigenpairs(lambda v: -2 * v, torch.zeros(3, 1, dtype=torch.float64))
    assert torch.equal(found.values, torch.full((3,), -2.0, dtype=torch.float64))


def test_a_sequence_that_keeps_few_directions_comes_to_the_same_end():
    A = symmetric(3, 25)
    product = lambda v: torch.einsum("kij,kj->ki", A, v)  # noqa: E731
    exact = torch.linalg.eigvalsh(A)[:, 0]
    short = smallest_eigenpairs(product, A[:, 0], iterations=8)
    for basis in (2, 8):
        found = smallest_eigenpairs(product, A[:, 0], iterations=400, basis=basis)
        assert torch.allclose(found.values, exact, atol=1e-6)
        assert (found.residuals < 1e-2).all()
    assert (found.values <= short.values + 1e-12).all()
    assert torch.equal(smallest_eigenpairs(product, A[:, 0], iterations=8, basis=8).values, short.values)
