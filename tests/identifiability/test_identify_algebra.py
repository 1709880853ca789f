"""Polynomial algebra against brute force."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.identifiability import partial
from palimpsest.identifiability import polynomials as poly
from palimpsest.identifiability.decomposition import orders
from palimpsest.identifiability.interpolation import extreme_singular_values
from palimpsest.identifiability.refinement import model, normal_matrix, slope, weighed

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(SIZES)
def test_weighted_monomials_turn_the_kernel_into_an_inner_product(size):
    d, q, seed = size
    u, v = normal(2, 6, d, seed=seed)
    V = poly.monomials(u, q)
    assert V.shape == (6, poly.monomial_count(d, q))
    torch.testing.assert_close(V @ poly.monomials(v, q).T, (u @ v.T) ** q)


def test_multinomial_weights_count_the_orderings_of_each_monomial():
    index, weight = poly.multi_indices(3, 4), poly.sqrt_multinomials(3, 4)
    orderings = [sum(sorted(t) == i.tolist() for t in product(range(3), repeat=4)) for i in index]
    torch.testing.assert_close(weight.square(), torch.tensor(orderings, dtype=torch.float64))


@settings(deadline=None, max_examples=30)
@given(SIZES)
def test_compressed_coefficients_are_those_of_the_full_tensor(size):
    d, q, seed = size
    c = normal(poly.monomial_count(d, q), seed=seed)
    T, w = poly.expand(c, d, q), normal(d, seed=seed + 1)
    torch.testing.assert_close(poly.contract(T, *[w] * q), poly.monomials(w[None], q)[0] @ c)
    torch.testing.assert_close(T.norm(), c.norm())  # the weights make compression an isometry


def test_jacobian_of_monomials_is_that_of_autograd():
    w = normal(3, 4)
    D = poly.monomials_jacobian(w, 3)
    for j in range(3):
        expected = torch.func.jacrev(lambda v: poly.monomials(v[None], 3)[0])(w[j])
        torch.testing.assert_close(D[j], expected)


@pytest.mark.parametrize("α", [3, 4, 5])
def test_power_sums_evaluate_and_differentiate_as_f(α):
    x, b, w = normal(3, 4), normal(3, seed=1), normal(4, seed=2)
    T = poly.power_sum(x, b, α)
    f = (x @ w) ** (α - 1) @ (b[:, None] * x)
    torch.testing.assert_close(poly.contract(T, *[w] * (α - 1)), f)
    torch.testing.assert_close(poly.gradient_coefficients(T) @ poly.monomials(w[None], α - 1)[0], f)
    Df = torch.func.jacrev(lambda v: (x @ v) ** (α - 1) @ (b[:, None] * x))(w)
    torch.testing.assert_close(poly.contract(T, *[w] * (α - 2)), Df / (α - 1))  # the slice M(w)


def test_symmetrisation_keeps_gradients_and_projects_the_rest():
    T = poly.power_sum(normal(5, 3), normal(5, seed=1), 4)
    torch.testing.assert_close(poly.symmetrise(poly.gradient_coefficients(T), 4), T)
    S = poly.symmetrise(normal(3, poly.monomial_count(3, 3)), 4)
    torch.testing.assert_close(S, S.permute(3, 1, 0, 2))


@pytest.mark.parametrize("scalar", [False, True])
def test_normal_matrix_and_slope_are_those_of_the_jacobian(scalar):
    w, z, signs = normal(7, 3), normal(2, 3, seed=1), torch.tensor([1.0, -1.0]).double()
    values = normal(7, seed=2) if scalar else normal(7, 3, seed=2)
    J = torch.func.jacrev(lambda v: model(w, v, signs, 4, scalar=scalar).flatten())(z).flatten(1)
    torch.testing.assert_close(normal_matrix(w, z, signs, 4, scalar=scalar), J.T @ J)
    residual = (values - model(w, z, signs, 4, scalar=scalar)).flatten()
    torch.testing.assert_close(slope(w, values, z, signs, 4).flatten(), J.T @ residual)


def test_count_of_monomials():
    assert poly.monomial_count(7, 3) == math.comb(9, 3) == len(poly.multi_indices(7, 3))


def test_parallel_points_are_one_direction():
    assert poly.distinct_directions(torch.tensor([[1.0, 2.0], [-2.0, -4.0], [1.0, 0.0]])) == 2


def test_orders_leave_a_slot_and_divide_the_rest():
    assert [orders(α) for α in (3, 4, 5)] == [[1], [1], [1, 2]]


def test_extreme_singular_values_of_a_diagonal_matrix():
    assert extreme_singular_values(torch.diag(torch.tensor([4.0, 0.125, 1.0])).double()) == (0.125, 4.0)


def test_weights_are_fitted_to_given_directions():
    w = normal(9, 2)
    z, signs = weighed(w, -8 * w[:, 0] ** 3, torch.eye(2, dtype=torch.float64), 3)
    torch.testing.assert_close(z, torch.diag(torch.tensor([2.0, 0.0])).double(), atol=1e-4, rtol=0)
    assert float(signs[0]) == -1


def test_the_span_of_the_values_has_a_bound():
    basis, bounds = partial.span(torch.tensor([[3.0, 0.0], [4.0, 0.0]]).double(), 1e-12)
    assert basis.shape == (2, 1)
    assert float(bounds[0]) < 1e-11


def test_four_terms_in_three_dimensions_are_not_three():
    e = torch.eye(3, dtype=torch.float64)
    assert not partial.is_indecomposable(poly.power_sum(e, torch.ones(3).double(), 3), 1e-12)
    assert partial.is_indecomposable(poly.power_sum(torch.cat([e, e.sum(0)[None]]), torch.ones(4).double(), 3), 1e-12)
