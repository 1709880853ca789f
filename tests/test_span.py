"""Counting the training images in the first layer's change."""

import pytest
import torch
import torch.nn.functional as F

import palimpsest as pal
from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.span import first_dense_layer


def train(
    n,
    *,
    depth=2,
    loss="squared",
    dtype=torch.float64,
    optimiser="sgd",
    momentum=0.9,
    decay=0.0,
    seed=0,
    **net,
):
    """A dense network trained for a few hundred steps on n random inputs, its start and those inputs."""
    torch.manual_seed(seed)
    model = pal.networks.MLP(80, (120,) * depth, **net).to(dtype)
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = torch.randn(n, 80, dtype=dtype), torch.randn(n, dtype=dtype).sign()
    if optimiser == "adam":
        rule = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=momentum, weight_decay=decay)
    for _ in range(200):
        out = model(x)[:, 0]
        value = (out - y).square().mean() if loss == "squared" else F.softplus(-y * out).mean()
        rule.zero_grad()
        value.backward()
        rule.step()
    return model, initial, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [5, 23, 60])
def test_the_number_of_images_is_read_exactly(n, depth, loss, dtype):
    model, initial, x = train(n, depth=depth, loss=loss, dtype=dtype, seed=n + depth)
    found = pal.span(model, initial)
    assert found.samples == n
    assert found.gap > 100
    assert found.shrinkage == 1.0
    assert len(found.subspace.basis) == n - 1  # the bias makes the space affine
    projected = found.subspace.images(found.subspace.coordinates(x.double()))
    assert (projected - x).norm() <= (1e-3 if dtype == torch.float32 else 1e-9) * x.norm()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_momentum_and_biases_change_nothing(momentum, bias):
    model, initial, x = train(12, momentum=momentum, bias=bias)
    found = pal.span(model, initial)
    assert found.samples == 12
    assert len(found.subspace.basis) == (12 if bias == "none" else 11)
    assert torch.allclose(found.subspace.images(found.subspace.coordinates(x)), x, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("n", [5, 30, 60])
def test_with_weight_decay_the_shrinkage_is_found_first(n, dtype):
    model, initial, x = train(n, decay=0.05, dtype=dtype)
    found = pal.span(model, initial)
    assert found.samples == n
    assert 0.5 < found.shrinkage < 0.99
    assert (found.subspace.images(found.subspace.coordinates(x.double())) - x).norm() <= 1e-3 * x.norm()


@pytest.mark.parametrize("n", [5, 60])
def test_after_adam_it_declines(n):
    model, initial, _ = train(n, optimiser="adam")
    found = pal.span(model, initial)
    assert found.samples is None
    assert found.subspace is None
    assert "no number of images" in found.reason


def test_more_images_than_dimensions_cannot_be_counted():
    model, initial, _ = train(100)
    assert pal.span(model, initial).samples is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_dead_units_and_a_frozen_bias_do_not_pass_for_a_count(dtype):
    """All-positive images leave many units dead, whose rows never move: their zeros are no gap."""
    torch.manual_seed(0)
    model = pal.networks.MLP(80, (120, 120)).to(dtype)
    model.layers[0].bias.requires_grad_(False)
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = torch.rand(9, 80, dtype=dtype) + 0.5, torch.randn(9, dtype=dtype).sign()
    with torch.no_grad():
        model.layers[0].weight[:60] = -model.layers[0].weight[:60].abs()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    rule = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(200):
        rule.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        rule.step()
    found = pal.span(model, initial)
    assert found.samples == 9
    assert found.gap < 1e15
    assert torch.allclose(found.subspace.images(found.subspace.coordinates(x.double())), x.double(), atol=1e-3)


def test_constant_inputs_do_not_pass_for_a_count():
    """Forty of eighty inputs never vary: the rank stops at 41 although there are 60 images."""
    torch.manual_seed(0)
    model = pal.networks.MLP(80, (120,)).double()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = torch.randn(60, 80).double(), torch.randn(60).double().sign()
    x[:, :20], x[:, 20:40] = 0.0, 0.7
    rule = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(100):
        rule.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        rule.step()
    assert pal.span(model, initial).samples is None


def test_polynomial_networks_have_a_first_layer_too():
    torch.manual_seed(0)
    model = pal.networks.PolynomialNetwork(20, 30, bias=True).double()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(7, 20).double()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-2 * parameter.grad
    assert pal.span(model, initial).samples == 7


def test_what_has_no_dense_first_layer_is_refused():
    conv = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    with pytest.raises(InvalidInputError):
        pal.span(conv, conv.state_dict())
    model, initial, _ = train(5)
    with pytest.raises(InvalidInputError, match=r"layers\.0\.weight"):
        pal.span(model, {})
    with pytest.raises(NonFiniteError):
        pal.span(model, initial | {"layers.0.weight": initial["layers.0.weight"] * float("nan")})


# --- which layer sees the images ---------------------------------------------------------------------


def trained_on(make, n, shape, **options):
    """A network after a few steps of gradient descent on n random images, and its start."""
    torch.manual_seed(0)
    model = make().double()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(n, *shape, dtype=torch.float64)
    rule = torch.optim.SGD(model.parameters(), lr=1e-4, **options)
    for _ in range(20):
        rule.zero_grad()
        (model(x).flatten() - torch.arange(n) % 2).square().mean().backward()
        rule.step()
    return model, initial


class Patches(torch.nn.Module):
    """Sees four patches of an image, one after the other."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(16, 30), torch.nn.Linear(120, 1)

    def forward(self, x):
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(x), 4, 16)
        return self.head(torch.relu(self.embed(patches)).flatten(1))


class HeadFirst(torch.nn.Module):
    """Registers its last layer before its first; the other way round the sizes would fit as well."""

    def __init__(self):
        super().__init__()
        self.head, self.body = torch.nn.Linear(64, 1), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.head(torch.relu(self.body(x.flatten(1))))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.head(torch.relu(self.c(torch.relu(self.a(x.flatten(1))))))


class Repeated(HeadFirst):
    def forward(self, x):
        return self.head(torch.relu(self.body(torch.relu(self.body(x.flatten(1))))))


class Scaled(torch.nn.Module):
    """A trained parameter of the network's own changes the images, or the outputs."""

    def __init__(self, before):
        super().__init__()
        self.before, self.scale = before, torch.nn.Parameter(torch.ones(()))
        self.body, self.head = torch.nn.Linear(64, 40), torch.nn.Linear(40, 1)

    def forward(self, x):
        h = self.head(torch.relu(self.body(x.flatten(1) * (self.scale if self.before else 1))))
        return h if self.before else h * self.scale


def sequence(*layers):
    return lambda: torch.nn.Sequential(*layers)


LAYERS = {
    "a perceptron": (lambda: pal.networks.MLP((1, 8, 8), (40,)), "layers.0.weight"),
    "a polynomial network": (lambda: pal.networks.PolynomialNetwork(64, 40), "W"),
    "a flattened image": (
        sequence(torch.nn.Flatten(), torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)),
        "1.weight",
    ),
    "a head registered first": (HeadFirst, "body.weight"),
    "a parameter after it": (lambda: Scaled(before=False), "body.weight"),
    "a parameter before it": (lambda: Scaled(before=True), None),
    "patches": (Patches, None),
    "weights shared with another layer": (Tied, None),
    "a layer called twice": (Repeated, None),
    "a convolution of the same size": (
        sequence(torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64, 1)),
        None,
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_images_are_counted_only_in_a_layer_that_sees_them_whole(kind):
    make, expected = LAYERS[kind]
    model, initial = trained_on(make, 2, (1, 8, 8))
    if expected is None:
        with pytest.raises(InvalidInputError):
            pal.span(model, initial, image_shape=(1, 8, 8))
    else:
        assert first_dense_layer(model, (1, 8, 8))[0] == expected
        assert pal.span(model, initial, image_shape=(1, 8, 8)).samples == 2


@pytest.mark.parametrize(
    "kind", ["a perceptron", "a polynomial network", "a flattened image", "a head registered first"]
)
def test_without_a_shape_it_is_found_by_trying(kind):
    make, expected = LAYERS[kind]
    model, initial = trained_on(make, 3, (64,))
    assert first_dense_layer(model)[0] == expected
    assert pal.span(model, initial).samples == 3


def test_looking_for_the_layer_leaves_the_network_as_it_is():
    model, initial = trained_on(HeadFirst, 2, (1, 8, 8))
    model.body.bias.requires_grad_(False)
    pal.span(model, initial)
    assert not model.body.bias.requires_grad
    assert not any(module._forward_pre_hooks for module in model.modules())
