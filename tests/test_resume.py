"""A run that is killed, interrupted or stopped goes on to the same bits as one that never was."""

import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import palimpsest as pal
from killing import NEVER, Moment, struck
from palimpsest.errors import CheckpointError, InvalidInputError
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.fingerprints import digest
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings
from palimpsest.solver.state import State

RUN = """
import sys, torch
torch.set_num_threads(1)
import palimpsest as pal
from palimpsest.solver.callbacks import Checkpoint
Checkpoint.__init__.__kwdefaults__["every_seconds"] = 0.0   # save at every record: more moments at which to be killed
torch.manual_seed(0)
models = [pal.networks.MLP((1, 6, 6), (40, 40)) for _ in range(3)]
rec = pal.reconstruct(
    pal.Path(models[-1], [m.state_dict() for m in models]), image_shape=(1, 6, 6), candidates=8, steps=600,
    splitting=pal.Splitting(direction="random"), record_every=10, checkpoint=sys.argv[1], progress=False)
pal.storage.save_tensors(sys.argv[2], {"images": rec.images, "multipliers": rec.multipliers, "ids": rec.ids,
    "lineage": rec.lineage}, {"history": rec.history, "loss": rec.loss})
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "run.py"
    path.write_text(RUN, encoding="utf-8")
    return path


def test_killed_at_random_moments_and_resumed_it_gives_the_same_bits(script, tmp_path):
    assert struck([script, tmp_path / "whole.safetensors", tmp_path / "expected"], tmp_path, NEVER).returncode == 0
    checkpoint, result, moments = tmp_path / "torn.safetensors", tmp_path / "result", random.Random(0)
    for _ in range(3):
        run = struck([script, checkpoint, result], tmp_path, Moment(checkpoint.name, moments.randint(1, 50)))
        assert run.returncode == -signal.SIGKILL, run.stderr
        State.load(checkpoint, json.loads(_description(checkpoint))["fingerprint"], torch.device("cpu"))
    assert struck([script, checkpoint, result], tmp_path, NEVER).returncode == 0
    expected, expected_description = pal.storage.load_tensors(tmp_path / "expected")
    actual, actual_description = pal.storage.load_tensors(result)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert actual_description == expected_description


def _description(path: Path) -> str:
    return json.dumps(pal.storage.load_tensors(path)[1])


def problem(**options):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)) for _ in range(2))
    options = {"candidates": 4, "steps": 40, "splitting": pal.Splitting(), "progress": False} | options
    return pal.reconstruct(pal.NTK(final, initial.state_dict()), image_shape=(1, 3, 3), **options)


class Interrupt(pal.Callback):
    """Presses Ctrl-C at a given step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_record(self, state, entry):
        if state.step == self.at:
            raise KeyboardInterrupt


def test_what_is_loaded_lies_in_memory_that_torch_allocated(tmp_path):
    """Memory of the file may be aligned otherwise, and some CPUs then round otherwise."""
    pal.storage.save_tensors(tmp_path / "saved", {"a": torch.ones(3), "b": torch.ones(5)}, {})
    tensors, _ = pal.storage.load_tensors(tmp_path / "saved")
    assert all(t.untyped_storage().resizable() for t in tensors.values())  # only torch's own memory is


@pytest.mark.parametrize("at", [0, 7, 14, 27, 39])
def test_interrupted_anywhere_it_saves_and_goes_on(at, tmp_path):
    path = tmp_path / "state.safetensors"
    whole = problem()
    with pytest.raises(KeyboardInterrupt):
        problem(checkpoint=path, callbacks=[Interrupt(at)])
    resumed = problem(checkpoint=path)
    assert torch.equal(resumed.images, whole.images)
    assert torch.equal(resumed.parents, whole.parents)
    assert resumed.history == whole.history


def test_a_finished_run_is_not_run_again(tmp_path):
    path = tmp_path / "state.safetensors"
    whole = problem(checkpoint=path)

    class Refuse(pal.Callback):
        def on_record(self, state, entry):
            raise AssertionError("there was nothing left to do")

    again = problem(checkpoint=path, callbacks=[Refuse()])
    assert torch.equal(again.images, whole.images)


@pytest.mark.parametrize("other", [{"seed": 1}, {"steps": 50}, {"splitting": None}, {"sharpness": (5.0, 50.0)}])
def test_a_state_of_another_problem_is_refused(other, tmp_path):
    path = tmp_path / "state.safetensors"
    problem(checkpoint=path)
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        problem(checkpoint=path, **other)


def test_a_method_or_a_subspace_that_differs_in_one_number_is_another_problem():
    shape = (1, 40, 50)
    model = pal.networks.MLP(shape, (6,))
    spaces = [pal.Subspace(torch.zeros(shape), torch.eye(3, 2000).reshape(3, *shape)) for _ in range(2)]
    spaces[1].basis[1, 0, 20, 0] = 1.0
    settings = Settings(candidates=2, sharpness=None)
    problems = [
        (pal.KKT(model), Everywhere(shape)),
        (pal.KKT(model, signed=True), Everywhere(shape)),
        (pal.KKT(model, sharpness=5.0), Everywhere(shape)),
        (pal.KKT(model), spaces[0]),
        (pal.KKT(model), spaces[1]),
    ]
    assert len({Solver(*problem, settings).fingerprint() for problem in problems}) == len(problems)
    assert Solver(*problems[0], settings).fingerprint() == Solver(*problems[0], settings).fingerprint()


def test_numbers_that_read_alike_side_by_side_are_other_settings():
    shape, objective = (1, 3, 3), pal.KKT(pal.networks.MLP((1, 3, 3), (6,)))
    many = Solver(objective, Everywhere(shape), Settings(candidates=12, steps=1000))
    one = Solver(objective, Everywhere(shape), Settings(candidates=1, steps=21000))
    assert many.fingerprint() != one.fingerprint()
    assert not many.init().continues(one.init())
    assert many.init().continues(many.init())


class Shade(pal.priors.Prior):
    """A prior as a user writes it, without a thought for data classes."""

    def __init__(self, weight, like=None):
        self.weight, self.like = weight, like

    def value(self, images, multipliers):
        return self.weight * images.square().mean()


class Plain(pal.optimisers.Optimiser):
    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def init(self, parameter):
        return {"last": torch.zeros_like(parameter)}

    def pace(self, step, factor):
        return pal.optimisers.Pace(factor * self.learning_rate)

    def update_(self, parameter, gradient, moments, pace):
        parameter.sub_(pace.rate * moments["last"].copy_(gradient))

    def rescaled(self, moments, scale):
        return {"last": moments["last"] * scale}


def test_a_run_with_a_users_own_prior_and_optimiser_is_resumed(tmp_path):
    path = tmp_path / "state.safetensors"

    def parts():
        like = {"shape": (1, 3, 3), "of": [np.arange(2000.0), torch.ones(3).bfloat16(), {1, 2}], "net": nn.Linear(2, 2)}
        torch.nn.init.ones_(like["net"].weight)
        torch.nn.init.ones_(like["net"].bias)
        return {"priors": Shade(0.5, like), "optimiser": Plain(0.01)}

    with pytest.raises(KeyboardInterrupt):
        problem(checkpoint=path, callbacks=[Interrupt(7)], **parts())
    for other in ({"priors": Shade(0.6, parts()["priors"].like)}, {"optimiser": Plain(0.02)}):
        with pytest.raises(CheckpointError):
            problem(checkpoint=path, **parts() | other)
    changed = parts()
    changed["priors"].like["of"][0][1000] = 0.5
    with pytest.raises(CheckpointError):
        problem(checkpoint=path, **changed)
    assert torch.equal(problem(checkpoint=path, **parts()).images, problem(**parts()).images)


class Brighter(pal.priors.TotalVariation):
    """A prior of ours with a setting that is no field."""

    def __init__(self, weight, by):
        super().__init__(weight=weight)
        object.__setattr__(self, "by", by)


class Warm(pal.KKT):
    def __init__(self, model, warmth):
        super().__init__(model)
        self.warmth = warmth


def test_settings_that_a_subclass_adds_tell_runs_apart():
    assert digest(Brighter(0.1, 1)) != digest(Brighter(0.1, 1000))
    model = pal.networks.MLP((1, 3, 3), (6,))
    warm, hot = (Solver(Warm(model, t), Everywhere((1, 3, 3)), Settings(candidates=2)) for t in (1.0, 2.0))
    assert warm.fingerprint() != hot.fingerprint()
    with pytest.raises(InvalidInputError):
        digest(np.array([object(), 1]))


@pytest.mark.parametrize("unknown", [lambda x: x, object(), torch.relu, partial(lambda x: x, 0), torch.Generator()])
def test_what_cannot_be_recognised_again_is_refused_before_a_run_is_saved(unknown, tmp_path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(InvalidInputError):
        problem(checkpoint=path, priors=Shade(0.5, unknown))
    assert not path.exists()
    problem(priors=Shade(0.5, unknown))


def test_damaged_foreign_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    problem(checkpoint=path)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="damaged"):
            problem(checkpoint=path)
    tensors, description = {"x": torch.zeros(1)}, {"format": 999, "fingerprint": ""}
    pal.storage.save_tensors(path, tensors, description)
    with pytest.raises(CheckpointError, match="another version"):
        problem(checkpoint=path)
    with pytest.raises(CheckpointError, match="no file"):
        pal.storage.load_tensors(tmp_path / "nothing")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    pal.storage.write_atomically(path, b"old")

    def full_disk(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        pal.storage.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
