"""The points that training really reaches, and datasets that explain the same weights."""

import pytest
import torch
from identifiability_problems import healthy, network, unit
from margin_problem import NoCounterexampleError, counterexample, max_margin, maxmargin, stationary_network

from palimpsest.errors import InvalidInputError
from palimpsest.identifiability import Extent, from_network, identify
from palimpsest.identifiability.polynomials import power_sum


def trained(degree: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    n, d = 3 + seed % 3, 3 + seed % 4
    x = unit(torch.randn(n, d, generator=generator, dtype=torch.float64))
    y = torch.randn(n, generator=generator, dtype=torch.float64).sign()
    return x, y, max_margin(x, y, degree=degree, neurons=12, seed=seed)


@pytest.mark.parametrize("degree", [3, 4, 5])
@pytest.mark.parametrize("seed", range(4))
def test_minima_of_the_margin_problem_have_few_neurons_and_determine_nothing(degree, seed):
    x, y, found = trained(degree, seed)
    assert found.residual < 1e-12
    assert (y * found.network(x)[:, 0] > 1 - 1e-12).all()
    assert found.is_minimum
    assert len(found.network.a) <= int(found.active.sum())
    other = counterexample(found.network, x[found.active], (y * found.multipliers)[found.active])
    assert_explains(found.network, other.samples, other.weights)
    assert other.distance > 0.05
    assert identify(*from_network(found.network), degree).certificate.verdict is Extent.NOT_IDENTIFIED


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_linear_and_quadratic_networks_have_counterexamples(degree, seed):
    x, y, found = trained(degree, seed)
    other = counterexample(found.network, x[found.active], (y * found.multipliers)[found.active])
    assert_explains(found.network, other.samples, other.weights)
    assert other.distance > 0.05
    true = moment(x[found.active], (y * found.multipliers)[found.active], degree)
    new = moment(other.samples, other.weights, degree)
    W = found.network.W.detach()
    if degree == 2:  # the moment is the same as far as the neurons see it
        true, new = true @ W.T, new @ W.T
    torch.testing.assert_close(true, new)


def moment(x, b, degree):
    return b @ x if degree == 1 else x.T @ (b[:, None] * x)


def assert_explains(net, x, b):
    """Stationarity, margins and signs, written out."""
    a, W, α = net.a.detach(), net.W.detach(), net.degree
    t = x @ W.T
    torch.testing.assert_close(α * a[:, None] * ((t ** (α - 1)).T @ (b[:, None] * x)), W, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close((t**α).T @ b, a, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(b.sign() * net(x)[:, 0].detach(), torch.ones(len(x)).double(), atol=1e-12, rtol=1e-12)


def test_negative_curvature_along_every_neuron():
    """(1−α)‖θ_j‖² is the curvature of the Lagrangian along neuron j: why neurons cannot outnumber samples."""
    x, y, found = trained(3, 1)
    a, W, b = found.network.a.detach(), found.network.W.detach(), y * found.multipliers
    for j in range(len(a)):
        θ = torch.cat([a[j : j + 1], W[j]])

        def along(s, θ=θ):
            return 0.5 * (1 + s) ** 2 * θ @ θ - (1 + s) ** 4 * θ[0] * (x @ θ[1:]) ** 3 @ b

        curvature = torch.func.hessian(along)(torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(curvature, -2 * θ @ θ)


def test_rank_N_determines_the_data_only_among_sets_of_the_same_size():
    """Two of the samples can be replaced by three in their plane, even where T is known."""
    x, b = torch.eye(3, dtype=torch.float64), torch.tensor([1.0, 1.2, 0.8]).double()
    net = stationary_network(x, b)
    other = counterexample(net, x, b, margins=False)
    assert other.dimension == 0
    assert len(other.samples) == 4
    torch.testing.assert_close(power_sum(other.samples, other.weights, 3), power_sum(x, b, 3))


def test_a_determined_sample_has_no_counterexample():
    x = torch.ones(1, 1, dtype=torch.float64)  # on a line, the margin gives the sample away
    found = max_margin(x, torch.ones(1), neurons=1)
    with pytest.raises(NoCounterexampleError):
        counterexample(found.network, x, found.multipliers)


def test_a_saddle_is_not_called_a_minimum():
    """Two equal neurons side by side are stationary with half the multiplier each, and joining them is shorter."""
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    one = max_margin(x, y, neurons=1)
    θ = torch.cat([one.network.a[:, None], one.network.W], 1).detach() * 2**-0.25
    λ = one.multipliers * 2**0.5
    pair = maxmargin._result(torch.cat([θ, θ]), λ, x, y, 3)
    assert one.is_minimum
    assert pair.residual < 1e-12
    assert pair.curvature < 0
    assert not pair.is_minimum


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, b: max_margin(x * torch.nan, b.sign()), "NaN"),
        (lambda x, b: max_margin(x[:0], b[:0]), "samples"),
        (lambda x, b: max_margin(x, b.sign(), degree=3.5), "degree"),
        (lambda x, b: max_margin(x, b.sign(), neurons=2), "neurons"),
        (lambda x, b: max_margin(x, torch.zeros(3)), "labels"),
        (lambda x, b: max_margin(torch.cat([x, x]), torch.tensor([1.0, 1, 1, -1, -1, -1])), "neurons"),
        (lambda x, b: stationary_network(x, 0 * b), "weights"),
        (lambda x, b: stationary_network(x, b, degree=2), "degree"),
        (lambda x, b: stationary_network(x, b[:2]), "weights"),
        (lambda x, b: counterexample(network(4, 5), x, b[:2]), "weights"),
        (lambda x, b: counterexample(network(5, 5), x, b), "coordinates"),
        (lambda x, b: counterexample(network(4, 5), x, b * torch.nan), "NaN"),
        (lambda x, b: counterexample(network(4, 5), x, b), "stationary"),
        (lambda x, b: counterexample(network(4, 5, bias=True), x, b), "bias"),
    ],
)
def test_wrong_use_is_named(call, name):
    x, b, _, _ = healthy(3, 4, 3, 1)
    with pytest.raises(InvalidInputError, match=name):
        call(x, b)
