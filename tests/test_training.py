"""Training: what converges, what is reported, what is refused."""

import math

import pytest
import torch
from torch import nn

from palimpsest.errors import (
    InvalidInputError,
    NoGradientError,
    NonFiniteError,
    TrainingDivergedError,
)
from palimpsest.networks import MLP, PolynomialNetwork
from palimpsest.training import Convergence, train
from palimpsest.training.coordinates import Coordinates, SpanCoordinates, coordinates


def problem(n=12, d=10, classes=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=dtype)
    return x, (torch.arange(n) % 2 * 2 - 1 if classes == 2 else torch.arange(n) % classes)


def network(d=10, hidden=(40, 40), outputs=1, seed=0, **options):
    torch.manual_seed(seed)
    return MLP(d, hidden=hidden, outputs=outputs, **options)


class Flat(nn.Module):
    """Outputs (k,), with layers whose behaviour depends on the mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Dropout(0.5), nn.Linear(60, 1))

    def forward(self, x):
        return self.body(x)[:, 0]


def test_squared_loss_reaches_the_labels_and_keeps_the_start():
    x, y = problem()
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit = train(model, x, y)
    assert fit.outcome is Convergence.CONVERGED
    assert fit.converged
    assert (fit.model(x)[:, 0] - y).abs().max() <= fit.tolerance * (1 + 1e-4)
    for name, value in model.state_dict().items():
        assert torch.equal(fit.initial[name], before[name])
        assert torch.equal(value, before[name])
    assert fit.history[0]["step"] == 0
    assert fit.history[-1]["loss"] < 1e-3 * fit.history[0]["loss"]
    assert fit.kkt_residual is None
    assert fit.accuracy == 1
    assert "converged" in fit.summary


def test_a_given_rate_is_plain_gradient_descent_with_momentum():
    x, y = problem(dtype=torch.float64)
    model = network().double()
    fit = train(model, x, y, steps=7, learning_rate=0.05, momentum=0.8, weight_decay=0.01)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=0.01)
    for _ in range(7):
        optimiser.zero_grad()
        ((model(x)[:, 0] - y) ** 2).mean().backward()
        optimiser.step()
    for ours, theirs in zip(fit.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("loss", "outputs"), [("logistic", 1), ("cross_entropy", 3)])
def test_separable_losses_go_on_after_the_loss_has_underflowed(loss, outputs):
    x, y = problem(n=6, d=60, classes=max(outputs, 2))
    start = network(60, hidden=(20,), outputs=outputs, scale=(0.1, 1))
    early, late = (train(start, x, y, loss=loss, steps=n, tolerance=1e-3) for n in (200, 800))
    assert early.loss < 1e-15
    assert late.history[-1]["log_loss"] < -1000
    assert late.loss == 0
    assert late.accuracy == 1
    assert late.normalised_margin > 1.005 * early.normalised_margin
    # Units on the kink of a ReLU keep the residual from falling steadily; it stays far below that of no explanation.
    assert late.kkt_residual < 0.5


def test_logarithmic_loss_and_its_gradient_agree_with_the_plain_ones():
    x, y = problem(dtype=torch.float64)
    model = network().double()
    fit = train(model, x, y, loss="logistic", steps=1, learning_rate=1e-3, momentum=0.0)
    L = nn.functional.softplus(-y * model(x)[:, 0]).mean()
    L.backward()
    assert fit.history[0]["loss"] == pytest.approx(L.item())
    for after, p in zip(fit.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(after, p - 1e-3 * p.grad / L.detach())


def test_cross_entropy_is_that_of_torch():
    x, y = problem(classes=4, dtype=torch.float64)
    model = network(outputs=4).double()
    fit = train(model, x, y, loss="cross_entropy", steps=1)
    assert fit.history[0]["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item())


def test_kkt_residual_and_margin_are_what_they_say():
    x, y = problem(dtype=torch.float64)
    fit = train(network(hidden=(30,)).double(), x, y, loss="logistic", steps=80)
    parameters = list(fit.model.parameters())
    margins = y * fit.model(x)[:, 0]
    weights = torch.sigmoid(-margins).detach()
    total = torch.cat([g.flatten() for g in torch.autograd.grad((weights * margins).sum(), parameters)])
    θ = torch.cat([p.detach().flatten() for p in parameters])
    c = (θ @ total / (total @ total)).clamp_min(0)
    assert fit.kkt_residual == pytest.approx(float((θ - c * total).norm() / θ.norm()), rel=1e-6)
    assert fit.degree == 2
    assert fit.normalised_margin == pytest.approx(float(margins.detach().min() / θ.norm() ** 2), rel=1e-6)


def test_a_linear_network_converges_to_the_maximum_margin():
    x = torch.tensor([[1.0, 2.0], [2.0, 0.5], [-1.0, -2.0], [-2.0, -0.5]], dtype=torch.float64)
    y = torch.tensor([1, 1, -1, -1])
    fit = train(network(2, hidden=(), bias="none").double(), x, y, loss="logistic", tolerance=0.02)
    best = max(
        float((y * (x @ torch.tensor([math.cos(t), math.sin(t)]).double())).min())
        for t in torch.linspace(0, 2 * math.pi, 20_000).tolist()
    )
    assert fit.degree == 1
    assert fit.normalised_margin == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_weight_decay_ends_at_a_stationary_point(loss):
    x, y = problem(dtype=torch.float64)
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    fit = train(smooth, x, y, loss=loss, weight_decay=0.1, tolerance=3e-6, momentum=0.98)
    assert fit.converged
    outputs = fit.model(x)[:, 0]
    L = ((outputs - y) ** 2).mean() if loss == "squared" else nn.functional.softplus(-y * outputs).mean()
    parameters = list(fit.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(L, parameters), strict=True):
        torch.testing.assert_close(-g / 0.1, p.detach(), atol=5e-3, rtol=0)


def test_weight_decay_settles_on_relu_networks_too():
    x, y = problem()
    fit = train(network(hidden=(30,)), x, y, loss="logistic", weight_decay=0.02)
    assert fit.converged
    assert fit.history[0]["gap"] == 1


def test_any_network_in_evaluation_mode():
    x, y = problem()
    torch.manual_seed(0)
    fit = train(Flat(), x, y)
    assert fit.converged
    assert not fit.model.training
    assert fit.degree is None
    assert fit.normalised_margin is None
    assert torch.equal(fit.initial["body.1.running_mean"], fit.model.state_dict()["body.1.running_mean"])


def test_convolutions_on_images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
    fit = train(nn.Sequential(*layers), torch.rand(9, 1, 8, 8), torch.arange(9) % 3, loss="cross_entropy", steps=300)
    assert fit.accuracy == 1
    assert fit.kkt_residual < fit.history[0]["kkt_residual"]


def test_polynomial_network_frozen_parameters_and_real_targets():
    torch.manual_seed(0)
    model = PolynomialNetwork(6, 40, activation=3)
    model.W.requires_grad_(False)
    x = torch.randn(8, 6)
    fit = train(model, x, torch.linspace(-0.3, 0.7, 8))
    assert fit.converged
    assert torch.equal(fit.model.W, model.W)
    assert math.isnan(fit.accuracy)
    assert fit.degree == 1


def test_squared_loss_on_classes():
    x, y = problem(classes=3)
    fit = train(network(outputs=3), x, y)
    assert (fit.model(x) - nn.functional.one_hot(y, 3)).abs().max() <= 0.0101


def test_running_out_of_steps_is_stated():
    x, y = problem()
    fit = train(network(), x, y, steps=3)
    assert fit.outcome is Convergence.OUT_OF_STEPS
    assert fit.outcome.value == "ran out of steps"
    assert fit.gap > fit.tolerance
    assert "did not converge in 3 steps" in fit.summary


def test_callback_sees_the_history():
    x, y = problem()
    seen = []
    fit = train(network(), x, y, steps=25, record_every=10, tolerance=1e-9, callback=seen.append)
    assert seen == fit.history
    assert [record["step"] for record in seen] == [0, 10, 20, 25]


def test_the_same_start_gives_the_same_end():
    x, y = problem()
    first, again = (train(network(), x, y, steps=50).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_divergence_has_a_name():
    x, y = problem()
    with pytest.raises(TrainingDivergedError, match="learning rate"):
        train(network(), x, y, learning_rate=100.0)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"loss": "hinge"}, None),
        ({"steps": 0}, None),
        ({"momentum": 1.0}, None),
        ({"learning_rate": -1.0}, None),
        ({"weight_decay": -1.0}, None),
        ({"tolerance": 0.0}, None),
        ({"loss": "cross_entropy"}, None),
        ({"loss": "logistic"}, torch.zeros(12)),
        ({}, torch.ones(11)),
    ],
)
def test_what_does_not_fit_together(options, labels):
    x, y = problem()
    with pytest.raises(InvalidInputError):
        train(network(), x, y if labels is None else labels, **options)


def test_labels_and_outputs_that_do_not_fit():
    x, y = problem()
    for loss in ("squared", "cross_entropy"):
        with pytest.raises(InvalidInputError, match="labels"):
            train(network(outputs=3), x, y, loss=loss)
    with pytest.raises(InvalidInputError):
        train(nn.Sequential(nn.Unflatten(1, (2, 5)), nn.Linear(5, 1)), x, y)
    with pytest.raises(NonFiniteError):
        train(network(), x * torch.inf, y)
    with pytest.raises(NoGradientError):
        train(network().requires_grad_(False), x, y)


def test_a_dead_network_and_a_perfect_one_are_no_accidents():
    x, y = problem()
    dead = network()
    with torch.no_grad():
        dead.layers[0].weight.zero_()
        dead.layers[0].bias.fill_(-1.0)
    assert train(dead, x, y, steps=30).outcome is Convergence.OUT_OF_STEPS
    fit = train(network(), x, torch.zeros(12), steps=400)
    again = train(fit.model, x, fit.model(x).detach())
    assert again.converged
    assert math.isfinite(again.history[-1]["log_loss"])
    assert "accuracy" not in again.summary


@pytest.mark.parametrize(("loss", "outputs"), [("squared", 1), ("logistic", 1), ("cross_entropy", 3)])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_fewer_images_than_pixels_are_trained_on_in_their_span_to_the_same_weights(loss, outputs, decay, monkeypatch):
    x, y = problem(n=6, d=40, classes=max(outputs, 2), dtype=torch.float64)
    x[1] = x[0]  # images need not be independent
    start = network(40, hidden=(20, 15), outputs=outputs).double()
    spanned = train(start, x, y, loss=loss, steps=60, weight_decay=decay)
    monkeypatch.setattr("palimpsest.training.problem.coordinates", Coordinates)
    whole = train(start, x, y, loss=loss, steps=60, weight_decay=decay)
    assert isinstance(coordinates(start, x), SpanCoordinates)
    for ours, plain in zip(spanned.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10)
    assert spanned.history[-1] == pytest.approx(whole.history[-1], rel=1e-6)
    assert spanned.normalised_margin == pytest.approx(whole.normalised_margin, rel=1e-6)


def test_what_no_image_moves_stays_exactly_where_it_was():
    x, y = problem(n=6, d=40)
    x[:, :5] = 0
    start = network(40, hidden=(20, 15))
    with torch.no_grad():
        start.layers[0].bias[:4] = -100.0  # dead units
    fit = train(start, x, y, steps=20)
    before, after = (model.layers[0].weight for model in (start, fit.model))
    assert isinstance(coordinates(start, x), SpanCoordinates)
    assert torch.equal(after[:4], before[:4])
    assert (after - before)[:, :5].abs().max() < 1e-7
    assert not torch.equal(after[4:], before[4:])


class Casting(nn.Linear):
    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(40, 9), nn.Hardswish(), nn.Linear(9, 1)), Casting(40, 1)])
def test_networks_that_cannot_be_smoothed_or_doubled_are_trained_all_the_same(model):
    x, y = problem(n=6, d=40)
    fit = train(model, x, y, steps=5)
    assert fit.history[-1]["loss"] < fit.history[0]["loss"]


class Attending(nn.Module):
    """Two tokens of five numbers, and torch's own attention, which does not have forward derivatives on a CPU."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(5, 15), nn.Linear(10, 1)

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 1, 2, 5)).chunk(3, dim=-1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).flatten(1))


def test_attention_is_trained():
    torch.manual_seed(0)
    x, y = problem(n=4)
    model = Attending()
    before = float(nn.functional.mse_loss(model(x)[:, 0], y.float()))
    fit = train(model, x, y, steps=200)
    assert nn.functional.mse_loss(fit.model(x)[:, 0], y.float()) < before


def test_no_images_are_refused():
    with pytest.raises(InvalidInputError):
        train(network(), torch.zeros(0, 10), torch.zeros(0))


def test_a_frozen_layer_stays_where_it_is_in_the_span():
    x, y = problem(n=6, d=40)
    start = network(40, hidden=(20, 15))
    start.layers[1].weight.requires_grad_(False)
    fit = train(start, x, y, steps=20)
    assert torch.equal(fit.model.layers[1].weight, start.layers[1].weight)
    assert not torch.equal(fit.model.layers[0].weight, start.layers[0].weight)
    start.layers[0].weight.requires_grad_(False)
    assert not isinstance(coordinates(start, x), SpanCoordinates)
