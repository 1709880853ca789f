"""Any damage to any file of a run folder ends in one sentence, or in the same verdict as before: never in another."""

import faulthandler
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest.cli.main import main
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions, reconstruct

SECONDS = 60  # after which a command counts as hung; each takes a fraction of one
NETWORK = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 1))
"""
TRAINING = "--data digits --per-class 2 --hidden 4 --steps 5".split()
READING = "--candidates 3 --steps 8 --rounds 1".split()
AUDIT = "--rungs W0 --shape 1,8,8 --samples 4 --candidates 4 --steps 10 --restarts 2 --tangents 1".split()
AUDIT += ["--control-steps", "3"]


# --- the folders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def runs(place) -> dict[str, Path]:
    """Two run folders of different seeds, each with everything that train, reconstruct and report make."""
    for name, seed in (("ours", "0"), ("other", "1")):
        folder = str(place / name)
        assert main(["train", "--out", folder, *TRAINING, "--seed", seed]) == 0
        assert main(["reconstruct", folder, *READING]) == 0
        assert main(["report", folder]) == 0
    return {name: place / name for name in ("ours", "other")}


@pytest.fixture(scope="module")
def audits(place) -> dict[str, Path]:
    """Two folders of audits of different seeds."""
    (place / "network.py").write_text(NETWORK)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    torch.save(model.state_dict(), place / "start.pt")
    data = pal.datasets.load("digits", per_class=2, seed=0)
    fit = pal.train(model, data.train.images, data.train.labels, steps=2000)
    torch.save(fit.model.state_dict(), place / "final.pt")
    np.savez(place / "images.npz", images=data.train.images.numpy(), labels=(data.train.labels.numpy() + 1) // 2)
    for name, seed in (("audit", "0"), ("other audit", "1")):
        assert main([*audit(place), "--seed", seed, "--out", str(place / name)]) == 0
    return {"ours": place / "audit", "other": place / "other audit"}


@pytest.fixture(scope="module")
def interrupted(runs, place) -> dict[str, Path]:
    """The run folders without a report, in the middle of the second reconstruction."""
    for name, folder in runs.items():
        copy = RunFolder(shutil.copytree(folder, place / f"{name}, interrupted"))
        (copy.path / "report.html").unlink()
        copy.write_variants({"without": copy.variants()["without"]})
        options = ReconstructOptions(candidates=3, steps=8, rounds=1)
        with pytest.raises(KeyboardInterrupt), copy.locked():
            reconstruct(copy, options, device=torch.device("cpu"), callbacks=lambda variant: [Interrupt()])
        assert copy.checkpoint.exists()
    return {name: place / f"{name}, interrupted" for name in runs}


class Interrupt(pal.Callback):
    def on_record(self, state, entry):
        if state.step > 3:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def unread(audits, place) -> dict[str, Path]:
    """The audits before the last run of the positive control, which needs the control's weights."""
    for name, folder in audits.items():
        copy = Path(shutil.copytree(folder, place / f"{name}, unread"))
        (copy / "W0" / "runs" / "positive-1.safetensors").unlink()
    return {name: place / f"{name}, unread" for name in audits}


def audit(place: Path) -> list[str]:
    files = {"weights": "final.pt", "initial": "start.pt", "data": "images.npz"}
    named = [word for name, file in files.items() for word in (f"--{name}", str(place / file))]
    return ["audit", "--network", f"{place / 'network.py'}:make", *named, *AUDIT]


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


# --- the damage --------------------------------------------------------------------------------------


def flipped(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[int(share * (len(content) - 1))] ^= 4
        path.write_bytes(content)


def truncated(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(path: Path, other: Path) -> None:
    copy = path.parents[2] / "elsewhere"
    shutil.move(path, copy)
    path.symlink_to(copy)


def replaced_by(make):
    def damage(path: Path, other: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE = {
    "truncated": truncated,
    "a bit flipped near the start": lambda path, other: flipped(path, 0.02),
    "a bit flipped in the middle": lambda path, other: flipped(path, 0.5),
    "a bit flipped near the end": lambda path, other: flipped(path, 0.98),
    "deleted": lambda path, other: path.unlink(),
    "of another run": lambda path, other: shutil.copy(other, path),
    "a link": linked,
    "a FIFO": replaced_by(os.mkfifo),
    "a directory": replaced_by(os.mkdir),
    "unreadable": lambda path, other: path.chmod(0),
}


@contextmanager
def alarm():
    def hung(*_):
        raise AssertionError("a command hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    # Whoever waits outside Python does not hear the alarm.
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(capsys, folder: Path, commands: list[list[str]]) -> list[str | None]:
    """What each command prints about a folder; None where it refuses in one sentence."""
    return [_told(capsys, folder, [str(folder) if word == "FOLDER" else word for word in words]) for words in commands]


def _told(capsys, folder: Path, command: list[str]) -> str | None:
    capsys.readouterr()
    with alarm():
        status = main(command)
    out, err = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    complaints = [line for line in err.splitlines() if line.startswith("palimpsest: ")]
    assert len(complaints) == (status != 0), err
    return None if status else out.replace(str(folder), "FOLDER")


def refused(capsys, folders: dict[str, Path], tmp_path: Path, damage: str, commands: list[list[str]], only: str = ""):
    """The files whose damage the last command refuses; for all others it must say the same as before."""
    if damage == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything")
    folder = Path(shutil.copytree(folders["ours"], tmp_path / "copies" / "run"))
    expected = told(capsys, folder, commands)
    assert None not in expected
    shutil.rmtree(tmp_path / "copies")
    names = set()
    for name in [Path(only)] if only else files(folders["ours"]):
        shutil.copytree(folders["ours"], folder)
        DAMAGE[damage](folder / name, folders["other"] / name)
        found = told(capsys, folder, commands)
        assert all(said in (None, before) for said, before in zip(found, expected, strict=True)), name
        names |= {str(name)} if found[-1] is None else set()
        shutil.rmtree(tmp_path / "copies")
    return names


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_run_folders_give_no_other_verdict(damage, runs, tmp_path, capsys):
    commands = [["reconstruct", "FOLDER", *READING], ["report", "FOLDER"]]
    found = refused(capsys, runs, tmp_path, damage, commands)
    if damage.startswith(("truncated", "a bit")):
        weights = {"initial.safetensors", "model.safetensors"}
        assert found == {"config.json", "reconstruction.safetensors"} | weights


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_audits_give_no_other_verdict(damage, audits, place, tmp_path, capsys):
    found = refused(capsys, audits, tmp_path, damage, [[*audit(place), "--out", "FOLDER"]])
    if damage.startswith(("truncated", "a bit", "of another run")):
        readings = {f"W0/runs/{role}-{i}.safetensors" for role in ("subject", "negative", "positive") for i in (0, 1)}
        facts = {"config.json", "preflight.json", "W0/plan.json", "W0/floor.json", "W0/control.safetensors"}
        assert found == facts | readings


@pytest.mark.parametrize("damage", ["truncated", "a bit flipped in the middle", "of another run", "a FIFO"])
def test_damaged_checkpoints_and_controls_give_no_other_verdict(damage, interrupted, unread, place, tmp_path, capsys):
    commands = [["reconstruct", "FOLDER", *READING], ["report", "FOLDER"]]
    assert refused(capsys, interrupted, tmp_path, damage, commands, only="checkpoint.safetensors")
    commands = [[*audit(place), "--out", "FOLDER"]]
    assert refused(capsys, unread, tmp_path, damage, commands, only="W0/control.safetensors")
