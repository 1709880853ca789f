"""Whose momentum is whose: states of torch's own optimisers, matched to the network's parameters."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from palimpsest.errors import NonFiniteError, WeightsError
from palimpsest.methods.optimiser_states import match


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(self.norm(self.stem(x)))))


def steps(model, optimiser, count=3):
    for seed in range(count):
        torch.manual_seed(seed)
        optimiser.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimiser.step()
    return optimiser


def decayed(model):
    """Matrices first, then vectors: the usual two groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def head_first(model):
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return [{"params": list(model.head.parameters()), "lr": 0.5}, {"params": rest}]


GROUPS = {"one": lambda model: list(model.parameters()), "decayed": decayed, "head first": head_first}
OPTIMISERS = {
    "momentum": lambda groups: SGD(groups, lr=0.01, momentum=0.9),
    "Adam": lambda groups: Adam(groups, lr=0.01, betas=(0.8, 0.99)),
    "AMSGrad": lambda groups: AdamW(groups, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "RMSprop": lambda groups: RMSprop(groups, lr=0.01, momentum=0.5),
}


def assert_matched(found, model, optimiser):
    """Every state and setting is the one that the optimiser itself keeps for the parameter."""
    for name, p in model.named_parameters():
        kept = optimiser.state[p]
        group = next(g for g in optimiser.param_groups if any(q is p for q in g["params"]))
        assert found.states[name].keys() == kept.keys()
        for entry, value in kept.items():
            assert torch.equal(torch.as_tensor(found.states[name][entry]), torch.as_tensor(value)), (name, entry)
        for setting in ("lr", "weight_decay", "betas", "eps", "momentum"):
            assert found.settings[name].get(setting) == group.get(setting)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", OPTIMISERS)
def test_states_find_their_parameters(groups, kind):
    torch.manual_seed(0)
    model = Small()
    optimiser = steps(model, OPTIMISERS[kind](GROUPS[groups](model)))
    found = match(Small(), optimiser.state_dict())
    assert list(found.states) == [name for name, _ in model.named_parameters()]
    assert_matched(found, model, optimiser)
    moment = {"momentum": "momentum_buffer", "RMSprop": "square_avg"}.get(kind, "exp_avg")
    assert found.moment(moment).keys() == found.states.keys()
    assert not found.moment("step")


def shuffled(model):
    """An order that no shape gives away."""
    named = list(model.named_parameters())
    return [{"params": named[5:2:-1]}, {"params": named[:3] + named[6:]}]


@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod.", "model."])
def test_names_that_torch_stored_come_first(wrapper):
    torch.manual_seed(0)
    model = Small()
    groups = [{"params": [(wrapper + n, p) for n, p in g["params"]]} for g in shuffled(model)]
    optimiser = steps(model, Adam(groups))
    assert_matched(match(Small(), optimiser.state_dict()), model, optimiser)


def test_names_that_are_given_come_before_all():
    torch.manual_seed(0)
    model = Small()
    groups = shuffled(model)
    optimiser = steps(model, Adam([{"params": [p for _, p in g["params"]]} for g in groups]))
    names = [name for g in groups for name, _ in g["params"]]
    with pytest.raises(WeightsError):
        match(Small(), optimiser.state_dict())
    assert_matched(match(Small(), optimiser.state_dict(), names=names), model, optimiser)
    for wrong in (names[1:], names[:-1] + names[:1], ["other", *names[1:]], names[::-1]):
        with pytest.raises(WeightsError):
            match(Small(), optimiser.state_dict(), names=wrong)


def test_states_keyed_by_name_need_no_numbers():
    model = Small()
    optimiser = steps(model, Adam(model.parameters()))
    content, names = optimiser.state_dict(), [name for name, _ in model.named_parameters()]
    content["state"] = {names[n]: state for n, state in content["state"].items()}
    content["param_groups"][0]["params"] = names
    assert_matched(match(Small(), content), model, optimiser)


def test_frozen_parameters_are_absent():
    model = Small()
    optimiser = steps(model, SGD(model.head.parameters(), lr=0.1, momentum=0.9))
    found = match(Small(), optimiser.state_dict())
    assert list(found.moment("momentum_buffer")) == ["head.weight", "head.bias"]
    trained = steps(model, SGD(model.norm.parameters(), lr=0.1, momentum=0.9)).state_dict()
    with pytest.raises(WeightsError, match="several"):
        match(Small(), trained)  # four parameters have three numbers
    frozen = Small().requires_grad_(False)
    frozen.norm.requires_grad_(True)
    assert list(match(frozen, trained).states) == ["norm.weight", "norm.bias"]


def test_parameters_that_were_given_but_frozen_have_settings_and_no_state():
    model = Small()
    model.stem.requires_grad_(False)
    optimiser = steps(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = match(Small(), optimiser.state_dict())
    assert [name for name, state in found.states.items() if not state] == ["stem.weight", "stem.bias"]
    assert found.settings["stem.weight"]["lr"] == 0.1
    assert torch.equal(
        found.moment("momentum_buffer")["body.bias"], optimiser.state[model.body.bias]["momentum_buffer"]
    )


def test_plain_descent_keeps_settings_alone():
    model = Small()
    optimiser = steps(model, SGD(model.parameters(), lr=0.1, weight_decay=0.2))
    found = match(Small(), optimiser.state_dict())
    assert not any(found.states.values())
    assert {settings["weight_decay"] for settings in found.settings.values()} == {0.2}


def test_an_order_that_shapes_alone_give_away_is_found():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimiser = steps(model, Adam(list(model.parameters())[::-1]))
    found = match(model, optimiser.state_dict())
    for name, p in model.named_parameters():
        assert torch.equal(found.states[name]["exp_avg"], optimiser.state[p]["exp_avg"])


def test_equal_layers_in_unknown_groups_are_refused():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimiser = steps(model, Adam([{"params": list(layer.parameters())} for layer in reversed(model)]))
    with pytest.raises(WeightsError, match="several"):
        match(model, optimiser.state_dict())


def test_many_equal_layers_are_refused_at_once():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimiser = Adam(groups)
    with pytest.raises(WeightsError, match="several"):
        match(model, optimiser.state_dict())


def changed(**content):
    model = Small()
    return steps(model, Adam(model.parameters())).state_dict() | content


NONE = {
    "nothing": {},
    "no groups": changed(param_groups=None),
    "empty groups": changed(param_groups=[]),
    "a group of numbers": changed(param_groups=[1, 2]),
    "a group without parameters": changed(param_groups=[{"lr": 1}]),
    "a parameter twice": changed(param_groups=[{"params": [0, 1, 1]}]),
    "numbers that are lists": changed(param_groups=[{"params": [[0]]}]),
    "a state that is a list": changed(state=[1]),
    "too many": changed(param_groups=[{"params": list(range(50))}]),
    "names of another network": changed(param_groups=[{"params": [0], "param_names": ["other"]}]),
    "another shape": changed(param_groups=[{"params": [0], "param_names": ["body.weight"]}]),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_state_of_this_networks_optimiser_is_refused(name):
    with pytest.raises(WeightsError):
        match(Small(), NONE[name])


def test_stored_names_that_are_no_names_do_not_count():
    content = changed(param_groups=[{"params": [0], "param_names": [[]]}])
    assert list(match(Small(), content).states) == ["stem.weight"]


def test_moments_that_are_not_finite_are_named():
    content = changed()
    content["state"][4]["exp_avg"][0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"exp_avg of body\.weight"):
        match(Small(), content)


def test_half_moments_become_single_and_odd_steps_are_left_out():
    content = changed()
    content["state"][0] = {"exp_avg": torch.ones(3, 4).bfloat16(), "step": "many"}
    content["state"][1]["step"] = 10**400
    found = match(Small(), content)
    assert found.states["stem.weight"].keys() == {"exp_avg"}
    assert found.states["stem.weight"]["exp_avg"].dtype == torch.float32
    assert "step" not in found.states["stem.bias"]
