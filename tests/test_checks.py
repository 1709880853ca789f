"""Saved states and results that no run could have written are refused, however well-formed they are."""

import json

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import CheckpointError
from palimpsest.files import storage


def resume(path):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)) for _ in range(2))
    objective = pal.NTK(final, initial.state_dict())
    return pal.reconstruct(
        objective,
        image_shape=(1, 3, 3),
        candidates=4,
        steps=12,
        checkpoint=path,
        splitting=pal.Splitting(),
        progress=False,
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "state.safetensors"
    resume(path)
    return storage.load_tensors(path)


COUNTED = {"step": 0, "split": 0, "eta": 0.0, "before": 0.1, "after": 0.1, "eigenvalues": []}


def tensors(**changes):
    return lambda old, description: (old | {name: change(old[name]) for name, change in changes.items()}, description)


def description(**changes):
    return lambda old, description: (old, description | {name: change(description) for name, change in changes.items()})


def without(name):
    return lambda old, description: ({key: t for key, t in old.items() if key != name}, description)


WRONG = {
    "a circular lineage": tensors(lineage=lambda t: torch.arange(len(t)).roll(1)),
    "candidates without a lineage": tensors(ids=lambda t: t + 1000),
    "candidates that are not finite": tensors(x=lambda t: t / 0),
    "multipliers that are not finite": tensors(multipliers=lambda t: t * torch.nan),
    "another image shape": tensors(x=lambda t: t.reshape(len(t), 9, 1)),
    "another precision": tensors(x=lambda t: t.double()),
    "fewer multipliers": tensors(multipliers=lambda t: t[1:]),
    "a generator of another kind": tensors(generator=lambda t: t[1:]),
    "no candidates": without("x"),
    "no memory": without("moments/x/mean"),
    "a step that is no number": description(step=lambda d: "3"),
    "a phase that begins after now": description(phase_start=lambda d: d["step"] + 1),
    "a unit of nothing": description(multiplier_unit=lambda d: 0.0),
    "a unit beyond all numbers": description(multiplier_unit=lambda d: 2**70),
    "an outcome that does not exist": description(outcome=lambda d: "won"),
    "a history that is none": description(history=lambda d: {}),
    "a record without figures": description(history=lambda d: [{"step": 0, "loss": 1.0}]),
    "counts that are none": description(history=lambda d: [COUNTED | {"images": "many"}]),
    "counts of nothing": description(history=lambda d: [COUNTED | {"among": 0}]),
    "eigenvalues that are none": description(history=lambda d: [{"step": 0, "split": 1, "eigenvalues": ["x"]}]),
    "a history nested without end": description(history=lambda d: json.loads("[" * 60 + "]" * 60)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_states_that_no_run_could_have_saved_are_refused(wrong, state, tmp_path):
    path = tmp_path / "state.safetensors"
    storage.save_tensors(path, *WRONG[wrong](*state))
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        resume(path)


def test_the_state_itself_is_accepted(state, tmp_path):
    storage.save_tensors(tmp_path / "state.safetensors", *state)
    assert len(resume(tmp_path / "state.safetensors").images) >= 4
