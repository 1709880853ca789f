"""Networks, and the smoothing of those that were never written with Palimpsest in mind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import palimpsest as pal
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.objectives import smoothing


@pytest.mark.parametrize(("bias", "with_bias"), [("first", [0]), ("all", [0, 1, 2]), ("none", [])])
def test_mlp_has_biases_where_asked(bias, with_bias):
    model = pal.networks.MLP((1, 4, 5), hidden=(6, 7), outputs=3, bias=bias)
    assert [i for i, layer in enumerate(model.layers) if layer.bias is not None] == with_bias
    assert model(torch.randn(2, 1, 4, 5)).shape == (2, 3)


def test_mlp_with_a_first_bias_alone_is_homogeneous_in_its_parameters():
    model = pal.networks.MLP(4, hidden=(6, 7), bias="first").double()
    torch.nn.init.normal_(model.layers[0].bias)
    x = torch.randn(3, 4, dtype=torch.float64)
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.allclose(model(x), 2**3 * before)


def test_mlp_scales_each_layer():
    torch.manual_seed(0)
    model = pal.networks.MLP(400, hidden=(300, 300), scale=(1e-3, 1.0, 2.0))
    measured = [layer.weight.std() * (layer.in_features / 2) ** 0.5 for layer in model.layers]
    assert torch.allclose(torch.stack(measured), torch.tensor([1e-3, 1.0, 2.0]), rtol=0.1)


@pytest.mark.parametrize(
    "arguments",
    [{"bias": "some"}, {"scale": (1.0, 2.0)}, {"hidden": (4, 0)}, {"outputs": 0}],
)
def test_mlp_refuses_what_makes_no_network(arguments):
    with pytest.raises(InvalidInputError):
        pal.networks.MLP(4, **arguments)


def test_polynomial_network_is_its_formula():
    net = pal.networks.PolynomialNetwork(3, 4, activation=(1.0, -2.0, 0.0, 0.5), bias=True).double()
    nn.init.normal_(net.b)
    x = torch.randn(5, 3, dtype=torch.float64)
    t = x @ net.W.T + net.b
    assert torch.allclose(net(x)[:, 0], (1 - 2 * t + 0.5 * t**3) @ net.a)
    assert net.degree == 3


@pytest.mark.parametrize("activation", [0, (1.0,), (1.0, 2.0, 0.0)])
def test_polynomial_network_refuses_a_constant_or_an_empty_top_degree(activation):
    with pytest.raises(InvalidInputError):
        pal.networks.PolynomialNetwork(3, 4, activation=activation)


# --- smoothing ----------------------------------------------------------------------------------

Z = torch.linspace(-3, 8, 23, dtype=torch.float64)
RELUS = {
    "torch.relu": torch.relu,
    "F.relu": F.relu,
    "F.relu in place": lambda z: F.relu(z.clone(), inplace=True),
    "Tensor.relu_": lambda z: z.clone().relu_(),
    "nn.ReLU": nn.ReLU(),
    "clamp": lambda z: z.clamp(min=0),
    "clamp_min": lambda z: torch.clamp_min(z, 0),
    "maximum": lambda z: torch.maximum(z, torch.zeros(())),
    "max": lambda z: torch.max(z, 0 * z),
    "fmax": lambda z: torch.fmax(z, 0 * z),
    "by keyword": lambda z: torch.relu(input=z),
    "clamp by keyword": lambda z: torch.clamp(input=z, min=0),
}


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS.keys())
def test_every_spelling_of_relu_becomes_the_same_softplus(relu):
    with smoothing.Smoothed(3.0):
        smooth = relu(Z)
    assert torch.allclose(smooth, torch.log1p(torch.exp(3 * Z)) / 3, rtol=1e-12, atol=0)


PIECEWISE_LINEAR = {
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "prelu": lambda z: F.prelu(z, torch.tensor(0.3, dtype=torch.float64)),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "abs": torch.abs,
    "clamp": lambda z: z.clamp(-1, 2),
    "minimum": lambda z: torch.minimum(z, torch.ones(())),
}


@pytest.mark.parametrize("activation", PIECEWISE_LINEAR.values(), ids=PIECEWISE_LINEAR.keys())
def test_piecewise_linear_activations_are_smooth_and_sharpen_to_themselves(activation):
    z = Z + 0.01  # away from the kinks
    with smoothing.Smoothed(4.0):
        curvature = torch.func.vmap(torch.func.grad(torch.func.grad(activation)))(z)
    with smoothing.Smoothed(1e5):
        sharp = activation(z)
    assert curvature.abs().max() > 0.1
    assert torch.allclose(sharp, activation(z), atol=1e-4)


def test_smooth_functions_and_guards_are_left_alone():
    with smoothing.Smoothed(1.0):
        assert torch.equal(torch.tanh(Z), Z.tanh())
        assert torch.equal(Z.clamp(min=1e-8), torch.clamp(Z, min=1e-8))


def test_softplus_derivatives_are_finite_and_exact_far_from_the_kink():
    z = torch.tensor([-1e4, -10.0, 0.0, 10.0, 1e4], requires_grad=True)
    (first,) = torch.autograd.grad(smoothing.softplus(z, 200.0).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), z)
    assert torch.allclose(first, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert torch.allclose(second, torch.tensor([0.0, 0.0, 50.0, 0.0, 0.0]))
    assert third.isfinite().all()


class Block(nn.Module):
    def __init__(self, activation) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.inner(x))


def network(activation) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Block(activation), nn.Linear(4, 1))


REFUSED = {
    "hardswish": (F.hardswish, "hardswish"),
    "threshold": (lambda z: F.threshold(z, 0.1, 0.0), "threshold"),
    "mask": (lambda z: z * (z > 0), "relu"),
    "sign": (torch.sign, "sign"),
}


@pytest.mark.parametrize(("activation", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_activation_that_cannot_be_smoothed_is_refused_by_the_name_of_its_layer(activation, reason):
    objective = pal.KKT(network(activation), sharpness=10.0)
    with pytest.raises(UnsupportedNetworkError, match=reason) as refusal:
        objective.loss(torch.randn(2, 4), torch.ones(2), torch.tensor([1, -1]))
    assert refusal.value.layer == "1"


def test_batch_statistics_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))
    with pytest.raises(UnsupportedNetworkError) as refusal:
        pal.KKT(model).loss(torch.randn(2, 4), torch.ones(2), torch.tensor([1, -1]))
    assert refusal.value.layer == "1"


def test_mixing_and_randomness_are_refused():
    x, λ, y = torch.randn(2, 4), torch.ones(2), torch.tensor([1, -1])
    with pytest.raises(UnsupportedNetworkError, match="mixes"):
        pal.KKT(network(lambda z: z - z.mean(0))).loss(x, λ, y)
    with pytest.raises(UnsupportedNetworkError, match="mixes"):
        pal.KKT(network(lambda z: F.batch_norm(z, 0 * z[0], 0 * z[0] + 1, training=True))).loss(x, λ, y)
    with pytest.raises(UnsupportedNetworkError):
        pal.KKT(network(lambda z: F.dropout(z, 0.5, training=True))).loss(x, λ, y)


def test_dropout_and_batch_normalisation_are_taken_in_evaluation_mode_without_touching_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
    objective = pal.KKT(model, sharpness=10.0)
    x, λ, y = torch.randn(2, 4), torch.ones(2), torch.tensor([1, -1])
    assert objective.loss(x, λ, y) == objective.loss(x, λ, y)
    assert model.training
