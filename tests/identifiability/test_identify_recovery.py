"""Exact recovery from exact evaluations, and its invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identifiability_problems import error, evaluate, healthy, unit
from margin_problem import stationary_network

from palimpsest.identifiability import Extent, from_network, identify

CASES = {  # n, d, α, m, scalar
    "square": (5, 5, 3, 20, False),
    "few samples in many dimensions": (4, 30, 3, 20, False),
    "fewer evaluations than monomials": (6, 6, 3, 12, False),
    "quartic": (6, 6, 4, 60, False),
    "quintic": (5, 8, 5, 80, False),
    "overcomplete quintic": (18, 6, 5, 260, False),
    "scalar cubic": (5, 6, 3, 80, True),
    "scalar quartic": (4, 5, 4, 90, True),
    "scalar, fewer than entries of T": (3, 12, 3, 200, True),
}


@pytest.mark.parametrize(("n", "d", "α", "m", "scalar"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_and_weights_come_back_to_machine_precision(n, d, α, m, scalar, seed):
    x, _, w, F = healthy(n, d, α, m, scalar=scalar, seed=seed)
    found = identify(w, F, α, norm=1.0, count=n)
    assert found.certificate.verdict is Extent.UP_TO
    assert error(found.samples, x) < 1e-10
    torch.testing.assert_close(evaluate(found.samples, found.weights, w, α, scalar=scalar), F)


@pytest.mark.parametrize("d", [3, 4, 5, 6])
def test_rank_N_stationary_points_determine_nearly_orthogonal_samples(d):
    generator = torch.Generator().manual_seed(d)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    x = unit(Q + 0.05 * torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5)
    b = torch.rand(d, generator=generator, dtype=torch.float64) + 0.5
    net = stationary_network(x, b)
    found = identify(*from_network(net), norm=1.0, network=net)
    assert torch.linalg.matrix_rank((net.W @ net.W.T) ** 2) == d * (d + 1) // 2  # rank(K) = N
    assert found.certificate.rank == found.certificate.needed
    assert error(found.samples, x) < 1e-10
    assert found.certificate.margins.dual_feasible


def test_margins_that_agree_give_the_scale_of_rescaled_weights():
    x, c = torch.eye(3, dtype=torch.float64), 2.0
    net = stationary_network(x, torch.ones(3))
    with torch.no_grad():
        output = net(x)[0, 0]
        rescale = float(output.abs() ** -0.25)  # to margins of one: θ̃ has its own multipliers
        net.a *= c * rescale
        net.W *= c * rescale
    found = identify(*from_network(net), norm=1.0, count=3, network=net)
    assert found.certificate.margins.spread < 1e-12
    assert found.certificate.margins.scale == pytest.approx(c)
    unscaled = stationary_network(x, torch.ones(3))
    with torch.no_grad():
        unscaled.a *= rescale
        unscaled.W *= rescale
    expected = identify(*from_network(unscaled), norm=1.0).weights
    torch.testing.assert_close(found.weights.sort().values, expected.sort().values)


@pytest.mark.parametrize("norm", [None, 2.0])
def test_a_common_norm_is_not_taken_for_the_scale_of_the_weights(norm):
    x, b = 2 * torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    net = stationary_network(x, b)
    points, values = from_network(net)
    found = identify(points, values, norm=norm, count=3, network=net)
    assert found.certificate.margins.spread < 1e-12
    assert any("scale" in question for question in found.certificate.not_identified) == (norm is None)
    if norm is None:
        torch.testing.assert_close(evaluate(found.samples, found.weights, points, 3), values)


def test_a_bias_fixes_sign_and_norm():
    x, b, _, _ = healthy(4, 5, 3, 1)
    lifted = torch.cat([3 * x, torch.ones(4, 1, dtype=torch.float64)], 1)
    w = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = identify(w, evaluate(lifted, b, w, 3), bias=True, count=4)
    assert found.certificate.verdict is Extent.IDENTIFIED
    assert error(found.samples, 3 * x, signed=True) < 1e-10
    torch.testing.assert_close(found.weights.sort().values, b.sort().values)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.floats(-3, 3), st.floats(-3, 3))
def test_recovery_commutes_with_rotation_and_scale(seed, log_points, log_values):
    x, b, w, F = healthy(4, 6, 3, 30, seed=seed % 5)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    found = identify(w @ Q * 10**log_points, F @ Q * 10**log_values)
    assert error(found.samples @ Q.T, x) < 1e-10
    expected = b.abs() * 10 ** (log_values - 2 * log_points)
    torch.testing.assert_close(found.weights.abs().sort().values, expected.sort().values)


def test_numpy_and_single_precision_are_accepted():
    x, _, w, F = healthy(4, 6, 3, 40)
    assert error(identify(w.numpy(), F.numpy()).samples, x) < 1e-10
    single = identify(w.numpy().astype(np.float32), F.numpy().astype(np.float32))
    assert 1e-12 < error(single.samples, x) < 1e-4
    assert single.certificate.noise > 1e-6


def test_large_problems_use_the_span_and_skip_the_normal_matrix():
    x, _, w, F = healthy(65, 100, 3, 2200)
    found = identify(w, F)
    assert found.certificate.reduced_dimension == 65
    assert math.isnan(found.certificate.jacobian_conditioning)
    assert error(found.samples, x) < 1e-10
