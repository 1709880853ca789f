"""Trainings by Adam, read through a model of its rescaling."""

import copy

import pytest
import torch

import brute_force
import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.adam_rule import adam_changes

LONG = (0.0, 1 - 1e-10)  # betas: no momentum, and a mean of squares over all steps


def test_the_rule_is_that_of_torch():
    gradients = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    θ = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    rule, changes = torch.optim.Adam([θ], lr=0.1, betas=LONG, eps=0.0), []
    for g in gradients:
        before, θ.grad = θ.detach().clone(), -g
        rule.step()
        changes.append((θ.detach() - before) / 0.1)
    assert torch.allclose(adam_changes(gradients, 0.0)[0], torch.stack(changes), rtol=1e-5)


def trained(images, y, *, steps, rate, betas=(0.9, 0.999), widths=(9, 8)):
    """A network after each step of Adam on all images, and the residuals with which it took the step."""
    model = pal.networks.MLP(images.shape[1:], widths).to(images)
    rule = torch.optim.Adam(model.parameters(), lr=rate, betas=betas, eps=1e-30)
    states, residuals = [copy.deepcopy(model.state_dict())], []
    for _ in range(steps):
        rule.zero_grad()
        off = model(images)[:, 0] - y
        (off.square().sum() / 2).backward()
        rule.step()
        residuals.append(-off.detach())
        states.append(copy.deepcopy(model.state_dict()))
    return model, states, torch.stack(residuals, 1)


def test_the_training_images_explain_every_step():
    torch.manual_seed(0)
    images, y = torch.rand(6, 1, 4, 4, dtype=torch.float64) - 0.5, torch.tensor([1.0, -1, 1, -1, 1, -1]).double()
    model, states, residuals = trained(images, y, steps=3, rate=0.01, betas=LONG)
    objective = pal.AdamPath(model, states, at=(0.0,), softness=0.0)
    assert float(objective.loss(images, residuals[:, :, None])) < 1e-9
    assert float(objective.loss(images, 100 * residuals[:, :, None])) < 1e-9  # the scale is not in the weights
    assert float(objective.loss(images.flip(0), residuals[:, :, None])) > 0.1
    plain = pal.Path(model, states, at=0.0)
    best = torch.linalg.lstsq(*features(plain, images, residuals.shape)).solution.view_as(residuals)
    assert float(plain.loss(images, best)) > 0.05  # no sum of gradients explains them


def test_a_new_round_starts_the_mean_of_squares_again():
    torch.manual_seed(0)
    images, y = torch.rand(6, 1, 4, 4, dtype=torch.float64) - 0.5, torch.tensor([1.0, -1, 1, -1, 1, -1]).double()
    rounds = [trained(images, y, steps=1, rate=0.01, betas=LONG) for _ in range(2)]
    λ = torch.cat([residuals for *_, residuals in rounds], 1)[:, :, None]
    pairs = [(states[0], states[1]) for _, states, _ in rounds]
    again = pal.AdamPath(rounds[1][0], pairs, at=(0.0,), softness=0.0)
    assert float(again.loss(images, λ)) < 1e-9
    assert float(pal.AdamPath(rounds[1][0], pairs, at=(0.0,), softness=0.0, continues=True).loss(images, λ)) > 0.01


def test_units_that_never_fire_leave_all_derivatives_finite():
    torch.manual_seed(0)
    before, after = (pal.networks.MLP(4, (5,), bias="all").double() for _ in range(2))
    for model in (before, after):
        model.layers[0].bias.data[0] = -1e6  # its gradients are zero
    ends = [before.state_dict(), after.state_dict()]
    x, λ = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 1, 2, dtype=torch.float64)
    for softness in (0.0, 0.1):
        objective = pal.AdamPath(after, ends, at=(0.2, 0.8), softness=softness, sharpness=4.0)
        found = [*objective.gradients(x, λ), objective.hessian(x, λ)(torch.randn_like(x))]
        assert all(bool(t.isfinite().all()) for t in found)


def test_parameters_that_did_not_move_do_not_take_part():
    before, after = (pal.networks.MLP(4, (5,)) for _ in range(2))
    start = before.state_dict() | {"layers.1.weight": after.state_dict()["layers.1.weight"]}
    objective = pal.AdamPath(after, [start, after.state_dict()], weights="auto")
    assert objective.weights["layers.1.weight"] == 0 < objective.weights["layers.0.weight"]


def features(objective, images, shape):
    """Columns that the multipliers combine, and the target, of the quadratic loss of `pal.Path`."""
    scale = torch.tensor(objective.segments.shares, dtype=images.dtype).sqrt()

    def rows(values):
        return torch.cat([(t.flatten(1) * scale[:, None]).flatten() for t in values.values()])

    eye = torch.eye(shape[0] * shape[1], dtype=images.dtype).view(-1, *shape)
    return torch.stack([rows(objective.represent(images, λ)) for λ in eye], 1), rows(objective.target)[:, None]


class Faint(torch.nn.Module):
    """A residual branch behind a scale of 1e-6, as some deep networks start it. Adam moves its parameters, too."""

    def __init__(self):
        super().__init__()
        self.near, self.branch, self.head = (torch.nn.Linear(4, n) for n in (4, 4, 1))
        self.scale = torch.nn.Parameter(torch.tensor(1e-6))

    def forward(self, x):
        h = torch.tanh(self.near(x))
        return self.head(h + self.scale * torch.tanh(self.branch(h)))


def test_parameters_with_small_gradients_take_part():
    torch.manual_seed(0)
    start, end = (Faint().double() for _ in range(2))
    end.scale.data.fill_(2e-6)
    objective = pal.AdamPath(end, [start.state_dict(), end.state_dict()], at=(0.3, 0.7), sharpness=4.0)
    x, λ = torch.randn(3, 4).double(), torch.randn(3, 1, 2).double()
    explained = objective.target["branch.weight"] - objective.residual(x, λ)["branch.weight"]
    assert explained.norm() > 0.01 * objective.target["branch.weight"].norm()
    torch.testing.assert_close(objective.loss(x, λ), brute_force.loss(objective, x, λ, None))


def test_it_reads_more_than_a_sum_of_gradients():
    data = pal.datasets.load("digits", per_class=5, seed=3)
    torch.manual_seed(0)
    images = data.centred(data.train.images)
    model, states, _ = trained(images, data.train.labels.float(), steps=60, rate=1e-3, widths=(60, 60))
    options = {"image_shape": data.image_shape, "candidates": 20, "steps": 400, "progress": False}
    ends = [states[0], states[-1]]
    ours = pal.reconstruct(pal.AdamPath(model, ends, weights="auto"), **options)
    plain = pal.reconstruct(pal.Path(model, ends, at=(0.15, 0.85), weights="auto"), **options)
    way = pal.reconstruct(pal.AdamPath(model, states[::20], at=(0.25, 0.75), weights="auto"), **options)
    found = [pal.score(rec, data.train.images, mean=data.mean).ssim.mean() for rec in (plain, ours, way)]
    assert found[0] + 0.1 < found[1] < found[2]


def test_arguments_that_cannot_be_used_are_refused():
    models = [pal.networks.MLP(4, (5,)) for _ in range(2)]
    ends = [model.state_dict() for model in models]
    for wrong in (
        {"at": 0.5},
        {"at": ()},
        {"at": (0.9, 0.1)},
        {"softness": -0.1},
        {"softness": float("nan")},
        {"weights": "likelihood"},
    ):
        with pytest.raises(InvalidInputError):
            pal.AdamPath(models[1], ends, **wrong)
