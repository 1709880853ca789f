"""Evaluations from gradients and from training, on raw 8×8 digits."""

import copy

import pytest
import torch
from identifiability_problems import batch_gradient, digits, error, healthy, network, unit

from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError
from palimpsest.identifiability import from_gradient, from_head_training, from_lazy_training, from_network, identify


@pytest.mark.parametrize("n", [10, 20, 40])
def test_one_batch_gradient_gives_back_the_raw_digits(n):
    x, y = digits(n, seed=n)
    net = network(64, n * (n + 1) // 2 + 60, bias=True)
    found = identify(*from_gradient(net, batch_gradient(net, x, y)), bias=True, count=n)
    assert error(found.samples, x, signed=True) < 1e-9


def test_one_batch_gradient_in_single_precision():
    x, y = digits(10)
    net = network(64, 120).float()
    found = identify(*from_gradient(net, batch_gradient(net, x.float(), y.float())))
    assert error(found.samples, unit(x)) < 1e-4


def test_sources_state_evaluations_of_f():
    x, y = digits(5)
    net = network(64, 30)
    points, values = from_gradient(net, batch_gradient(net, x, y))
    b = 2 * (net(x)[:, 0].detach() - y) / len(x)
    torch.testing.assert_close(values, (points @ x.T) ** 2 @ (b[:, None] * x))


@pytest.mark.parametrize("steps", [1, 100, 5000])
def test_training_of_the_head_gives_back_the_digits_after_any_number_of_steps(steps):
    n, (x, y) = 4, digits(4, seed=1)
    initial = network(64, 900)
    final = copy.deepcopy(initial)
    features = (x @ initial.W.detach().T) ** 3
    rate, momentum, velocity = 0.4 / float(torch.linalg.matrix_norm(features, 2)) ** 2, 0.5, 0.0
    with torch.no_grad():
        for _ in range(steps):
            velocity = momentum * velocity - rate * features.T @ (features @ final.a - y)
            final.a += velocity
    found = identify(*from_head_training(initial, final))
    assert len(found.samples) == n
    assert error(found.samples, unit(x)) < 1e-8


@pytest.mark.parametrize("steps", [1, 10, 200])
def test_lazy_training_with_small_movement(steps):
    """Relative movement 1e-5, whatever the number of steps: the place of the gradients is found."""
    x, y = digits(6, seed=2)
    initial, final = network(64, 200), network(64, 200)
    size = float(torch.cat([p.detach().flatten() for p in initial.parameters()]).norm())
    rate = None
    for _ in range(steps):
        gradient = batch_gradient(final, unit(x), y)
        rate = rate or 1e-5 * size / steps / float(torch.cat([g.flatten() for g in gradient.values()]).norm())
        with torch.no_grad():
            for name, p in final.named_parameters():
                p -= rate * gradient[name]
    assert error(identify(*from_lazy_training(initial, final)).samples, unit(x)) < 1e-5


@pytest.mark.parametrize("activation", [(0.0, 1.0, 0.5, 1.0), (0.3, -1.0, 2.0, 1.5, 0.7)])
@pytest.mark.parametrize("bias", [False, True])
def test_lower_powers_of_the_activation_are_taken_away(activation, bias):
    x, y = digits(6, seed=5)
    net = network(64, 300, activation, bias=bias)
    found = identify(*from_gradient(net, batch_gradient(net, x, y)), net.degree, bias=bias)
    assert error(found.samples, x if bias else unit(x), signed=bias) < 1e-8


def test_lower_powers_of_the_activation_in_the_head():
    x, _, _, _ = healthy(3, 4, 3, 1)
    initial = network(4, 80, (0.5, 1.0, -2.0, 1.0))
    final = copy.deepcopy(initial)
    with torch.no_grad():
        t = initial.W @ x.T
        final.a += (0.5 + t - 2 * t**2 + t**3) @ torch.tensor([1.0, -2.0, 0.5]).double()
    assert error(identify(*from_head_training(initial, final)).samples, x) < 1e-8


def test_dead_neurons_are_dropped_and_dead_heads_refused():
    net = network(3, 10)
    with torch.no_grad():
        net.a[:4] = 0
    assert len(from_network(net)[0]) == 6
    with torch.no_grad():
        net.a.zero_()
    with pytest.raises(NoGradientError):
        from_network(net)


@pytest.mark.parametrize("name", ["W", "a", "b"])
@pytest.mark.parametrize("activation", [3, (0.0, 1.0, 1.0, 1.0)])
def test_nan_is_named(name, activation):
    net = network(3, 20, activation, bias=True)
    with torch.no_grad():
        getattr(net, name)[0] = torch.nan
    for read in (from_network, lambda net: from_gradient(net, dict(net.named_parameters()))):
        with pytest.raises(NonFiniteError):
            read(net)
    with pytest.raises(NonFiniteError):
        from_head_training(net, net)


def test_wrong_pairs_of_networks_are_refused():
    one, two = network(3, 10), network(3, 10, seed=1)
    with pytest.raises(InvalidInputError, match="from_lazy_training"):
        from_head_training(one, two)
    with pytest.raises(InvalidInputError, match="shape"):
        from_lazy_training(one, network(3, 11))
    with pytest.raises(InvalidInputError, match="activation"):
        from_head_training(one, network(3, 10, 4))
    with pytest.raises(InvalidInputError, match="precision"):
        from_lazy_training(one, network(3, 10).float())
    with pytest.raises(InvalidInputError, match="degree"):
        from_gradient(network(3, 10, 1), {})
    biased = network(3, 10, bias=True)
    with pytest.raises(InvalidInputError, match=r"\bb\b"):
        from_gradient(biased, {"W": biased.W, "b": torch.ones(20)})
    with pytest.raises(InvalidInputError, match=r"\bW\b"):
        from_gradient(one, {"a": one.a})
    with pytest.raises(InvalidInputError, match="neurons"):
        from_network(network(3, 4, (0.0, 1.0, 1.0, 1.0)))
