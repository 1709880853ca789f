"""One vocabulary of methods for runs, audits and experiments."""

import copy
from typing import get_args

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.runs.problems import METHODS, WHITENING, Method, problem
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.training import LossName

SHAPE = (1, 4, 4)


@pytest.fixture(scope="module")
def fit():
    torch.manual_seed(0)
    images, labels = torch.randn(4, *SHAPE), torch.tensor([1, -1, 1, -1])
    return pal.train(pal.networks.MLP(SHAPE, hidden=(20,)), images, labels, steps=50)


def way(fit):
    end = fit.model.state_dict()
    return [fit.initial, {name: (t + end[name]) / 2 for name, t in fit.initial.items()}, end]


def gradient(fit):
    """The gradient of a batch of two images."""
    model = copy.deepcopy(fit.model)
    model(torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_every_loss_has_a_method():
    assert METHODS.keys() == set(get_args(LossName))
    assert set(METHODS.values()) <= set(get_args(Method))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ntk", lambda fit: pal.NTK(fit.model, fit.initial, at=(0.2, 0.8), weights="auto")),
        ("kkt", lambda fit: pal.KKT(fit.model, initial=fit.initial, weights="auto")),
        ("kkt-signed", lambda fit: pal.KKT(fit.model, signed=True, initial=fit.initial, weights="auto")),
        ("multiclass", lambda fit: pal.MulticlassKKT(fit.model, initial=fit.initial, weights="auto")),
        ("path", lambda fit: pal.Path(fit.model, way(fit), at=(0.2, 0.8), weights="auto")),
        ("gradient", lambda fit: pal.Gradient(fit.model, gradient(fit), weights="auto")),
    ],
)
def test_options_give_the_same_objective_as_python(method, expected, fit):
    made, space = problem(method, fit.model, fit.initial, at=(0.2, 0.8), checkpoints=way(fit), gradient=gradient(fit))
    wanted = expected(fit)
    assert space is None
    assert (type(made), made.signed, made.weights) == (type(wanted), wanted.signed, wanted.weights)
    assert all(torch.equal(made.target[name], t) for name, t in wanted.target.items())


def test_the_span_is_chosen_for_ntk_alone(fit):
    made, space = problem("ntk", fit.model, fit.initial, within=None)
    assert space is not None
    assert made.whitening == WHITENING
    assert problem("ntk", fit.model, fit.initial, within="span", whitening=0.0)[0].whitening == 0
    assert problem("kkt", fit.model, fit.initial, within=None)[1] is None
    assert problem("kkt", fit.model, fit.initial, within="span")[1] is not None


def test_a_gradient_and_a_path_are_searched_in_their_own_spans(fit):
    made, space = problem("gradient", fit.model, gradient=gradient(fit), within=None)
    assert made.whitening == WHITENING
    assert len(space.basis) == 1  # the line through the two images of the batch
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    flat = space.shaped(SHAPE).to(dtype=torch.float32)
    torch.testing.assert_close(flat.images(flat.coordinates(x)), x, rtol=1e-3, atol=1e-3)
    made, space = problem("path", fit.model, checkpoints=way(fit), within=None)
    assert (made.whitening, len(space.basis)) == (WHITENING, 3)


@pytest.mark.parametrize("within", ["everywhere", None])
def test_ntk_starts_from_what_weight_decay_left(within):
    torch.manual_seed(0)
    images, labels = torch.randn(4, *SHAPE), torch.tensor([1, -1, 1, -1])
    fit = pal.train(pal.networks.MLP(SHAPE, hidden=(20,)), images, labels, steps=50, weight_decay=1e-2)
    found = pal.span(fit.model, fit.initial)
    made, _ = problem("ntk", fit.model, fit.initial, within=within)
    assert 0 < found.shrinkage < 1
    for name, t in fit.model.state_dict().items():
        torch.testing.assert_close(made.target[name], t - found.shrinkage * fit.initial[name])


def test_a_network_whose_first_layer_is_convolutional_is_searched_everywhere():
    def make():
        return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 1))

    made, space = problem("ntk", make(), make().state_dict(), within=None)
    assert (space, made.whitening) == (None, 0.0)


OTHER = pal.networks.MLP((1, 4, 4), hidden=(20,)).state_dict()  # not the initial weights


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "ntk", "rule": "adam", "whitening": 0.5}, "whitening"),
        ({"method": "kkt", "within": "span", "whitening": 0.5}, "--whitening"),
        ({"method": "ntk", "initial": None}, "--initial"),
        ({"method": "path"}, "--checkpoints"),
        ({"method": "gradient"}, "optimiser"),
        ({"method": "kkt", "within": "span", "initial": None}, "--initial"),
        ({"method": "kkt", "within": "span", "initial": OTHER}, "--within"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(options, named, fit):
    with pytest.raises(InvalidInputError, match=named):
        problem(**{"model": fit.model, "initial": fit.initial} | options)


@pytest.mark.parametrize("loss", METHODS)
def test_no_tangent_points_are_refused_by_name_with_every_method(loss, fit):
    with pytest.raises(InvalidInputError, match="--at"):
        ReconstructOptions(at=()).problem(fit.model, fit.initial, loss)
