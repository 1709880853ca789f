"""Priors against their formulas and against finite differences."""

import pytest
import torch

import palimpsest as pal
from palimpsest.solver.priors import Box, MinimumMultiplier, Sum, TotalVariation

PRIORS = [
    Box(low=-0.5, high=0.5),
    TotalVariation(),
    MinimumMultiplier(minimum=0.3),
    Box(low=-0.2) + TotalVariation(),
    Box(low=-torch.rand(2, 4, 5, dtype=torch.float64)),
    Box.around(torch.linspace(0, 1, 40, dtype=torch.float64).reshape(2, 4, 5), weight=3.0),
]


@pytest.fixture
def point():
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64),
        torch.randn(3, 2, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: type(prior).__name__)
def test_gradients_equal_finite_differences(prior, point):
    x, λ = point
    dx, dλ = prior.gradients(x, λ)
    u, v, h = torch.randn_like(x), torch.randn_like(λ), 1e-6
    measured = (prior.value(x + h * u, λ + h * v) - prior.value(x - h * u, λ - h * v)) / (2 * h)
    assert measured == pytest.approx(float((dx * u).sum() + (dλ * v).sum()), rel=1e-6)
    assert measured != 0


def test_values_are_their_formulas(point):
    x, λ = point
    outside = (x.abs() - 0.5).clamp_min(0)
    assert Box(weight=2.0, low=-0.5, high=0.5).value(x, λ) == pytest.approx(float(2 * outside.square().mean()))
    across = sum(((x[i, c, a, b + 1] - x[i, c, a, b]) ** 2 + 1e-3) ** 0.5
                 for i in range(3) for c in range(2) for a in range(4) for b in range(4))  # fmt: skip
    down = sum(((x[i, c, a + 1, b] - x[i, c, a, b]) ** 2 + 1e-3) ** 0.5
               for i in range(3) for c in range(2) for a in range(3) for b in range(5))  # fmt: skip
    assert TotalVariation(weight=0.1).value(x, λ) == pytest.approx(float(0.1 * (across + down) / x.numel()))
    assert MinimumMultiplier(minimum=0.1).value(x, torch.full_like(λ, 0.2)) == 0
    assert MinimumMultiplier(weight=3.0, minimum=0.1).value(x, torch.zeros_like(λ)) == pytest.approx(3.0)


def test_a_box_around_the_mean_holds_what_is_left_of_images_without_it(point):
    mean = torch.rand(2, 4, 5, dtype=torch.float64)
    images = torch.rand(3, 2, 4, 5, dtype=torch.float64)
    box = Box.around(mean, weight=2.0)
    assert box.value(images - mean, point[1]) == 0
    beyond = torch.tensor(2 * 0.5**2 / images.numel(), dtype=torch.float64)
    for value in (-0.5, 1.5):
        images[1, 1, 2, 3] = value
        torch.testing.assert_close(box.value(images - mean, point[1]), beyond)


def test_the_tensors_of_a_prior_take_on_the_precision_of_a_run():
    network = pal.networks.MLP((1, 2, 2), (3,))
    mean = torch.rand(1, 2, 2, dtype=torch.float64)
    both = Box.around(mean, weight=10.0) + TotalVariation()
    rec = pal.reconstruct(pal.KKT(network), image_shape=(1, 2, 2), candidates=2, steps=2, priors=both, progress=False)
    assert rec.images.dtype is torch.float32
    assert both.placed(mean.float()).priors[0].low.dtype is torch.float32


def test_a_penalty_does_not_depend_on_how_many_candidates_share_it(point):
    x, λ = point
    for prior in PRIORS:
        twice = prior.value(torch.cat([x, x]), torch.cat([λ, λ]))
        assert twice == pytest.approx(float(prior.value(x, λ)))


def test_no_prior_costs_nothing(point):
    dx, dλ = Sum(()).gradients(*point)
    assert Sum(()).value(*point) == 0
    assert not dx.any()
    assert not dλ.any()


def test_inputs_that_are_no_images_have_no_variation(point):
    assert TotalVariation().value(torch.randn(3, 7), point[1]) == 0
