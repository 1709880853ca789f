"""Known gradients and the moments of optimisers as targets."""

import copy

import pytest
import torch

import brute_force
import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.spaces import Subspace


def problem(outputs=1, seed=0):
    torch.manual_seed(seed)
    model = pal.networks.MLP((1, 3, 3), (8, 7), outputs).double()
    return model, torch.randn(4, 1, 3, 3).double(), torch.randn(4, outputs).double()


def gradient_of(model, x, y) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(x) - y).square().sum().backward()
    return {name: θ.grad.clone() for name, θ in model.named_parameters()}


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_images_of_a_batch_explain_its_gradient(outputs):
    model, x, y = problem(outputs)
    objective = pal.Gradient(model, gradient_of(model, x, y), weights="auto")
    λ = 2 * (model(x) - y).detach()
    λ = λ[:, 0] if outputs == 1 else λ
    assert objective.loss(x, λ) <= 1e-24 * objective.target_norm_squared
    assert objective.loss(x, 0 * λ) == objective.target_norm_squared


def test_a_run_reads_the_batch():
    torch.manual_seed(0)
    model, x, y = pal.networks.MLP((1, 3, 3), (60, 60)).double(), torch.randn(2, 1, 3, 3).double() / 3, torch.ones(2, 1)
    objective = pal.Gradient(model, gradient_of(model, x, y.double()), weights="auto")
    rec = pal.reconstruct(objective, image_shape=(1, 3, 3), candidates=4, steps=600, priors=(), progress=False)
    cosine = torch.cosine_similarity(rec.images.flatten(1)[:, None], x.flatten(1)[None], dim=2)
    assert cosine.amax(0).min() > 0.95


def test_parameters_without_a_gradient_do_not_take_part():
    model, x, y = problem()
    whole = gradient_of(model, x, y)
    some = {name: None if "bias" in name else g for name, g in whole.items()}
    objective = pal.Gradient(model, some, sharpness=4.0)
    λ = torch.randn(4).double()
    assert set(objective.target) == {name for name in whole if "bias" not in name}
    for found, expected in zip(objective.gradients(x, λ), brute_force.gradients(objective, x, λ, None), strict=True):
        assert torch.allclose(found, expected, rtol=1e-10)


def test_another_tangent_point_is_another_place_for_all_parameters():
    model, x, y = problem()
    other = problem(seed=1)[0]
    gradient = gradient_of(other, x, y)
    del gradient["layers.1.weight"]  # it has a value at the tangent point all the same
    here = pal.Gradient(model, gradient, tangent=other.state_dict())
    there = pal.Gradient(other, gradient)
    λ = torch.randn(4).double()
    assert torch.equal(here.loss(x, λ), there.loss(x, λ))


def test_gradients_that_cannot_be_used_are_refused():
    model, x, y = problem()
    whole = gradient_of(model, x, y)
    first = next(iter(whole))
    for wrong in ({}, {first: None}, {name: 0 * g for name, g in whole.items()}, whole | {"no": torch.ones(1)},
                  whole | {first: torch.ones(2)}, list(whole.values())):  # fmt: skip
        with pytest.raises(InvalidInputError):
            pal.Gradient(model, wrong)
    with pytest.raises(pal.errors.NonFiniteError):
        pal.Gradient(model, whole | {first: whole[first] / 0})


# --- optimisers -------------------------------------------------------------------------------------


def steps_of(rule, model, x, y, count) -> list[dict[str, torch.Tensor]]:
    """Takes so many steps, each on half of the images, and returns their gradients."""
    gradients = []
    for step in range(count):
        gradients.append(gradient_of(model, x[step % 2 :: 2], y[step % 2 :: 2]))
        rule.step()
    return gradients


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_two_states_of_an_optimiser_give_the_gradients_between_them(kind):
    model, x, y = problem()
    rule = (
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.8)
        if kind == "sgd"
        else torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.7, 0.9))
    )
    β, share = (0.8, 1.0) if kind == "sgd" else (0.7, 0.3)
    steps_of(rule, model, x, y, 3)
    previous = copy.deepcopy(rule.state_dict())
    gradients = steps_of(rule, model, x, y, 2)
    steps = 2 if kind == "sgd" else None
    found = pal.moments(model, rule.state_dict(), previous=previous, steps=steps)
    for name, m in found.items():
        assert torch.allclose(m, share * (β * gradients[0][name] + gradients[1][name]), rtol=1e-9, atol=1e-12)
    now = pal.moments(model, rule.state_dict())
    key = "momentum_buffer" if kind == "sgd" else "exp_avg"
    assert all(torch.equal(now[name], rule.state[θ][key]) for name, θ in model.named_parameters())


def test_the_first_step_of_adam_can_be_undone():
    model, x, y = problem()
    initial = copy.deepcopy(model.state_dict())
    rule = torch.optim.Adam(model.parameters(), lr=1e-3)
    (gradient,) = steps_of(rule, model, x, y, 1)
    found = pal.undo_adam(model, initial, rule.state_dict())
    assert all(torch.allclose(found[name], -1e-3 * g, rtol=1e-6, atol=1e-13) for name, g in gradient.items())
    objective = pal.Gradient(model, found, tangent=initial)
    frozen = copy.deepcopy(model)
    frozen.load_state_dict(initial)
    λ = -1e-3 * 2 * (frozen(x[::2]) - y[::2]).detach()[:, 0]
    assert objective.loss(x[::2], λ) <= 1e-9 * objective.target_norm_squared


def test_states_that_cannot_be_used_are_refused():
    model, x, y = problem()
    other = pal.networks.MLP((1, 3, 3), (8,)).double()
    rules = {
        "plain": torch.optim.SGD(model.parameters(), lr=1e-3),
        "momentum": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        "adam": torch.optim.Adam(model.parameters()),
    }
    for rule in rules.values():
        steps_of(rule, model, x, y, 1)
    found = {name: copy.deepcopy(rule.state_dict()) for name, rule in rules.items()}
    adam, momentum = found["adam"], found["momentum"]
    for state in (found["plain"], {}, {"state": {}, "param_groups": []}):
        with pytest.raises(pal.errors.PalimpsestError):
            pal.moments(model, state)
    for arguments in ({"previous": momentum}, {"previous": adam}, {"previous": found["plain"], "steps": 1}):
        with pytest.raises(InvalidInputError):
            pal.moments(model, momentum, **arguments)
    for network, state in ((other, adam), (model, momentum), (model, {})):
        with pytest.raises(pal.errors.PalimpsestError):
            pal.undo_adam(network, model.state_dict(), state)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_weight_decay_is_taken_out_of_a_moment(kind):
    """If θ does not move, the moment is that of a training without decay."""
    model, x, y = problem()
    found = []
    for decay in (0.0, 0.1):
        options = {"momentum": 0.5} if kind == "SGD" else {}
        rule = getattr(torch.optim, kind)(model.parameters(), lr=0.0, weight_decay=decay, **options)
        steps_of(rule, model, x, y, 40)
        found.append(pal.moments(model, rule.state_dict()))
    for name, without in found[0].items():
        torch.testing.assert_close(found[1][name], without, rtol=1e-6, atol=1e-9)


def test_moments_of_scaled_gradients_are_refused():
    model, x, y = problem()
    rule = torch.optim.RMSprop(model.parameters(), momentum=0.9)
    steps_of(rule, model, x, y, 2)
    with pytest.raises(InvalidInputError):
        pal.moments(model, rule.state_dict())


def test_amsgrad_divides_by_the_largest_second_moment():
    model, x, y = problem()
    initial = copy.deepcopy(model.state_dict())
    rule = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.5), amsgrad=True)
    steps_of(rule, model, x, y, 1)
    state = rule.state_dict()
    for values in state["state"].values():
        values["exp_avg_sq"] = values["exp_avg_sq"] / 100
    undone, plain = pal.undo_adam(model, initial, state), pal.undo_adam(model, initial, rule.state_dict())
    assert all(torch.equal(undone[name], plain[name]) for name in plain)


def test_tied_weights_may_have_checkpoints():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[2].weight = model[0].weight
    start = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    objective = pal.Path(model, [start, model.state_dict()])
    assert float(objective.loss(torch.randn(2, 4), torch.zeros(2, 1))) == pytest.approx(1.0)


def test_the_likelihood_does_not_change_within_a_subspace():
    """The smaller network has fewer inputs, but its residuals have the same mean squares."""
    model, x, y = problem()
    objective = pal.Gradient(model, gradient_of(model, x, y), weights="likelihood", sharpness=4.0)
    space = Subspace(torch.zeros(1, 3, 3).double(), torch.randn(3, 1, 3, 3).double())
    c, λ = torch.randn(2, 3).double(), torch.randn(2).double()
    inside = objective.within(space)
    assert torch.allclose(inside.loss(c, λ), objective.loss(space.images(c), λ), rtol=1e-9)


def test_the_likelihood_is_for_one_target():
    model = problem()[0]
    states = [problem(seed=seed)[0].state_dict() for seed in (1, 2)] + [model.state_dict()]
    with pytest.raises(InvalidInputError):
        pal.Path(model, states, weights="likelihood")
