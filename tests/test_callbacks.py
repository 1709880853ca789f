"""Who watches a run: what each callback hears, also where one of them fails."""

import sys
from types import ModuleType

import pytest
import torch

import palimpsest as pal
from palimpsest.cli.main import main


def run(**options):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)) for _ in range(2))
    options = {"candidates": 4, "steps": 20, "progress": False} | options
    return pal.reconstruct(pal.NTK(final, initial.state_dict()), image_shape=(1, 3, 3), **options)


class Listener(pal.Callback):
    """Writes down what it hears, and fails where it is told to."""

    def __init__(self, name="", heard=None, fails=()):
        self.name, self.heard, self.fails = name, [] if heard is None else heard, fails

    def _hear(self, what):
        self.heard.append(f"{self.name}{what}")
        if what in self.fails:
            raise ArithmeticError(f"{self.name}{what}")

    def on_start(self, state):
        self._hear("start")

    def on_record(self, state, entry):
        self._hear("record")

    def on_stop(self, state):
        self._hear("stop")

    def on_end(self, state):
        self._hear("end")


@pytest.mark.parametrize("progress", [False, True])
def test_an_error_at_the_start_surfaces_and_only_those_that_started_hear_of_the_stop(progress):
    heard = []
    watchers = [Listener("a ", heard), Listener("b ", heard, fails=["start"]), Listener("c ", heard)]
    with pytest.raises(ArithmeticError, match="b start"):
        run(callbacks=watchers, progress=progress)
    assert heard == ["a start", "b start", "a stop"]


def test_every_callback_hears_of_the_stop_and_the_state_is_saved_before(tmp_path):
    path, heard = tmp_path / "state.safetensors", []

    class Look(Listener):
        def on_stop(self, state):
            heard.append(path.exists())
            super().on_stop(state)

    watchers = [Look("a ", heard, fails=["record", "stop"]), Listener("b ", heard)]
    with pytest.raises(ArithmeticError, match="a stop") as error:
        run(callbacks=watchers, checkpoint=path)
    assert isinstance(error.value.__context__, ArithmeticError)
    assert heard == ["a start", "b start", "a record", True, "a stop", "b stop"]
    assert torch.equal(run(checkpoint=path).images, run().images)


def test_every_callback_hears_of_the_end_and_the_state_is_saved_before(tmp_path):
    path, heard = tmp_path / "state.safetensors", []
    watchers = [Listener("a ", heard, fails=["end"]), Listener("b ", heard)]
    with pytest.raises(ArithmeticError, match="a end"):
        run(callbacks=watchers, checkpoint=path)
    assert heard[-2:] == ["a end", "b end"]
    assert pal.storage.load_tensors(path)[1]["outcome"] is not None


class Interrupt(pal.Callback):
    def on_record(self, state, entry):
        raise KeyboardInterrupt


def test_an_interrupt_says_how_to_keep_a_run_unless_it_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt) as lost:
        run(callbacks=[Interrupt()])
    assert any("checkpoint=" in note for note in lost.value.__notes__)
    with pytest.raises(KeyboardInterrupt) as kept:
        run(callbacks=[Interrupt()], checkpoint=tmp_path / "state.safetensors")
    assert not hasattr(kept.value, "__notes__")


def test_a_result_is_shown_in_one_line():
    rec = run()
    assert len(repr(rec).splitlines()) == 1
    assert "4 images of 1×3×3" in repr(rec)
    assert str(rec.outcome) in repr(rec)


def test_each_variant_has_its_own_curves(tmp_path, monkeypatch):
    curves = {}

    class Writer:
        def __init__(self, folder):
            self.steps = curves.setdefault(folder, {})

        def add_scalar(self, name, value, step):
            self.steps.setdefault(name, []).append(step)

        def close(self):
            pass

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), "--per-class", "2", "--hidden", "10", "--steps", "20"]) == 0
    reading = ["reconstruct", str(folder), "--candidates", "4", "--steps", "12", "--tensorboard"]
    assert main(reading) == 0
    assert curves.keys() == {str(folder / "tensorboard" / variant) for variant in ("with", "without")}
    assert all(written["loss"] == sorted(set(written["loss"])) for written in curves.values())
    curves.clear()
    assert main(reading) == 0
    assert not curves
