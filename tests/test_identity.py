"""A run folder knows whose its files are, loses nothing before its replacement is there, and stays within itself."""

import errno
import os
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import palimpsest as pal
from palimpsest.auditing import stages
from palimpsest.auditing.truth import numbers
from palimpsest.cli.main import main
from palimpsest.errors import (
    DataError,
    InvalidInputError,
    PalimpsestError,
    RunFolderError,
    StorageError,
    WeightsError,
)
from palimpsest.files import storage
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions, reconstruct
from palimpsest.runs.train import TrainOptions, is_trained, train
from test_damage import alarm

SHAPE = (1, 8, 8)
CPU = torch.device("cpu")
TRAINING = ["--data", "digits", "--per-class", "2", "--hidden", "5", "--steps", "3"]
READING = ["--candidates", "4", "--steps", "16"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    for command in (["train", *TRAINING, "--out"], ["reconstruct", *READING], ["report"]):
        assert main([*command, str(path)]) == 0
    return path


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes]:
    """All files but those that every command writes to."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "log.txt")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --- which training ----------------------------------------------------------------------------------


class Killed(BaseException):
    """What no handler expects."""


def dying_after(count: int, real):
    """A function that works so many times."""
    calls = iter(range(10**6))

    def call(*arguments):
        if next(calls) >= count:
            raise Killed
        return real(*arguments)

    return call


@pytest.mark.parametrize("replaced", [0, 1, 2, 3])
def test_a_training_that_is_killed_while_it_is_written_is_not_mixed_with_the_one_before(
    replaced, run, monkeypatch, capsys
):
    assert main(["report", str(run)]) == 0
    before = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "replace", dying_after(replaced, os.replace))
        patch.setattr(RunFolder, "forget_reconstructions", dying_after(0, None))
        with pytest.raises(Killed):
            main(["train", "--out", str(run), *TRAINING, "--seed", "1", "--again"])
    assert (run / "reconstruction.safetensors").exists()
    for command in (["reconstruct", str(run), *READING], ["report", str(run)]):
        capsys.readouterr()
        status = main(command)
        assert status == (0 if replaced == 0 else 2)
    assert replaced or capsys.readouterr().out == before
    assert main(["train", "--out", str(run), *TRAINING, "--seed", "1", "--again"]) == 0
    assert main(["reconstruct", str(run), *READING]) == 0


def test_the_same_training_is_recognised_with_a_data_root(tmp_path):
    command = ["train", "--out", str(tmp_path / "run"), *TRAINING, "--data-root", str(tmp_path)]
    assert main(command) == 0
    assert main(command) == 0
    assert is_trained(
        RunFolder(tmp_path / "run"),
        TrainOptions(data="digits", per_class=2, hidden=(5,), steps=3, data_root=tmp_path),
    )


def test_the_same_training_is_recognised_with_a_list_and_a_text(tmp_path):
    options = TrainOptions(data="digits", per_class=2, hidden=[5], steps=3, data_root=str(tmp_path))
    with RunFolder(tmp_path / "run").locked(create=True) as folder:
        train(folder, options, device=torch.device("cpu"))
    assert is_trained(folder, options)


def test_no_certificate_is_computed_only_to_be_stored(finished):
    assert all("certificate" not in fields for fields in RunFolder(finished).variants().values())


# --- nothing is lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["train", *TRAINING, "--seed", "1", "--out"], ["reconstruct", "--steps", "24"]])
def test_a_full_disk_loses_nothing_of_what_is_to_be_replaced(command, run, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = content(run)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        assert main([*command, str(run), "--again"]) == 2
    assert content(run) == before
    assert main(["report", str(run)]) == 0


def test_what_replaces_a_reading_is_there_before_it_goes(run, monkeypatch):
    folder, other = RunFolder(run), ReconstructOptions(candidates=4, steps=24)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_variants", dying_after(1, RunFolder.write_variants))
        with pytest.raises(Killed), folder.locked():
            reconstruct(folder, other, device=CPU, again=True)
    assert {name: fields["settings"]["steps"] for name, fields in folder.variants().items()} == {
        "without": 24,
        "with": 16,
    }
    with folder.locked():
        reconstruct(folder, other, device=CPU, variants=["without"], again=True)
    assert folder.variants().keys() == {"without"}
    assert len(folder.snapshots("without", folder.owner_of("without", folder.variants()["without"]["settings"]))) == 4
    assert not folder.snapshots("with")


# --- nothing is done elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "log.txt", "snapshots", "config.json", "report.html"])
def test_a_link_in_a_run_folder_is_not_followed(name, run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run / name, elsewhere)
    if name == ".lock":
        elsewhere.write_text("somebody's work")
    before = content(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()
    (run / name).symlink_to(elsewhere)
    for command in (["report"], ["reconstruct", *READING], ["train", *TRAINING, "--again", "--out"]):
        assert main([*command, str(run)]) == 2
    assert before == (content(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes())


def test_a_link_to_a_run_folder_is_followed(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert main(["report", str(tmp_path / "latest")]) == 0


def test_a_lock_is_not_emptied(run):
    (run / ".lock").write_text("kept")
    assert main(["report", str(run)]) == 0
    assert (run / ".lock").read_text() == "kept"


def test_leftovers_of_killed_writes_are_removed(run):
    leftovers = [run / ".model.safetensors.x1.part", run / "snapshots" / ".with-00000008.safetensors.x2.part"]
    for path in leftovers:
        path.write_bytes(b"half")
    assert main(["report", str(run)]) == 0
    assert not any(path.exists() for path in leftovers)


def test_names_speak_neither_to_the_terminal_nor_through_the_log(tmp_path, capsys):
    folder = tmp_path / "a\x1b[31m\u202eb"
    for command in (["train", *TRAINING, "--out"], ["reconstruct", *READING], ["report"]):
        assert main([*command, str(folder)]) == 0
    with suppress(RunFolderError), RunFolder(folder).locked():
        raise RunFolderError(f"{folder} failed")
    for text in (*capsys.readouterr(), (folder / "log.txt").read_text()):
        assert not set("\x1b\u202e") & set(text)


SOURCES = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_file_is_refused_as_input_at_once(source, tmp_path):
    def made(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        SOURCES[source](path)
        return path

    (tmp_path / "b").mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "b" / "image.png")
    with alarm():
        with pytest.raises(DataError):
            pal.datasets.load(made("data.npz"))
        with pytest.raises(InvalidInputError):
            numbers(str(made("mean.npy")), SHAPE)
        for name in ("net.pt", "net.safetensors"):
            with pytest.raises(WeightsError):
                pal.weights.load(made(name))
        made("a/image.png")
        with pytest.raises(DataError):
            pal.datasets.load(tmp_path)


def test_a_link_to_an_image_is_an_image(tmp_path):
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "real.npz", images=np.random.default_rng(0).random((8, 4, 4)), labels=np.arange(8) % 2)
    (tmp_path / "data.npz").symlink_to(tmp_path / "real.npz")
    assert len(pal.datasets.load(tmp_path / "data.npz", per_class=2).train) == 4


def test_too_few_file_descriptors_are_not_taken_for_damage(finished):
    handles = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        with suppress(OSError):
            while True:
                handles.append(os.open(os.devnull, os.O_RDONLY))
        for load, name in ((storage.load_tensors, "model.safetensors"), (storage.load_json, "config.json")):
            with pytest.raises(StorageError, match=os.strerror(errno.EMFILE)):
                load(finished / name)
            os.close(handles.pop())
            assert load(finished / name)
            handles.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- audits ------------------------------------------------------------------------------------------

SOURCE = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.{activation}(), nn.Linear(6, 1))
"""
QUICK = {"candidates": 4, "steps": 10, "restarts": 2, "tangents": 1, "control_steps": 1, "rungs": ("W0",)}


def network(activation=nn.ReLU):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), activation(), nn.Linear(6, 1))


@pytest.fixture(scope="module")
def weights():
    """(initial, trained)."""
    torch.manual_seed(0)
    model = network()
    data = pal.datasets.load("digits", per_class=2, seed=0)
    fit = pal.train(model, data.train.images, data.train.labels, steps=50)
    return fit.initial, fit.model.state_dict()


def audit(weights, out, make=network, **options):
    initial, trained = weights
    return pal.audit(make, trained, initial=initial, image_shape=SHAPE, out=out, **QUICK | options)


def test_another_network_of_equal_shapes_is_another_audit(weights, tmp_path):
    audit(weights, tmp_path / "audit")
    for activation in (nn.Tanh, nn.GELU, nn.LeakyReLU):
        with pytest.raises(RunFolderError, match="with other network"):
            audit(weights, tmp_path / "audit", lambda activation=activation: network(activation))
    audit(weights, tmp_path / "audit")


def test_a_large_bias_hides_no_other_network(weights, tmp_path):
    shifted = [{**w, "3.bias": w["3.bias"] + 300} for w in weights]
    audit(shifted, tmp_path / "audit")
    with pytest.raises(RunFolderError, match="with other network"):
        audit(shifted, tmp_path / "audit", lambda: network(nn.Tanh))


def test_a_reading_of_one_role_is_not_taken_for_another(weights, tmp_path):
    found = audit(weights, tmp_path / "audit", controls=False)
    runs = tmp_path / "audit" / "W0" / "runs"
    for number in (0, 1):
        shutil.copy(runs / f"negative-{number}.safetensors", runs / f"subject-{number}.safetensors")
    with pytest.raises(PalimpsestError, match="belongs to another run"):
        audit(weights, tmp_path / "audit", controls=False)
    assert found.finished


def test_other_code_that_gives_the_same_outputs_is_the_same_network(weights, tmp_path, caplog):
    file = tmp_path / "their_network.py"
    file.write_text(SOURCE.format(activation="ReLU"))
    first = audit(weights, tmp_path / "audit", f"{file}:make")
    file.write_text(f"# Changed.\n{SOURCE.format(activation='ReLU')}")
    with caplog.at_level("INFO", "palimpsest"):
        assert audit(weights, tmp_path / "audit", f"{file}:make").verdict == first.verdict
    assert caplog.text.count("code of the network changed") == 1
    recorded = RunFolder(tmp_path / "audit").config["audit"]["network"]
    assert recorded["code"]["name"] == f"{file}:make"
    assert len(recorded["code"]["sha256"]) == 64


@pytest.mark.parametrize("role", ["negative", "positive"])
def test_a_full_disk_in_a_control_is_told_and_the_same_command_goes_on(role, weights, tmp_path, monkeypatch):
    real = stages.save_tensors

    def full(path, *arguments, **options):
        if path.name.startswith(role):
            raise StorageError("cannot write: No space left on device")
        real(path, *arguments, **options)

    expected = audit(weights, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "save_tensors", full)
        with pytest.raises(StorageError):
            audit(weights, tmp_path / "audit")
    assert audit(weights, tmp_path / "audit").verdict == expected.verdict


def test_a_failed_audit_leaves_no_folder(weights, tmp_path, monkeypatch):
    def impossible(*_, **__):
        raise InvalidInputError("the network does not fit")

    monkeypatch.setattr(sys.modules["palimpsest.auditing.audit"], "preflight", impossible)
    with pytest.raises(InvalidInputError):
        audit(weights, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()


def test_a_factory_that_fails_later_is_told_as_it_is(weights, tmp_path):
    audit(weights, tmp_path / "audit")
    for run in (tmp_path / "audit" / "W0" / "runs").glob("positive-*"):
        run.unlink()
    calls = iter(range(10**6))

    def failing():
        if next(calls) > 1:  # the subject and its start are made first
            raise ZeroDivisionError("no more networks")
        return network()

    with pytest.raises(InvalidInputError, match="no more networks"):
        audit(weights, tmp_path / "audit", failing)


WRONG = {
    "W0/plan.json": [
        *[{"steps": "20"}, {"restarts": [2]}, {"at": "half"}, {"at": [None]}, {"seed": None}, {"extra": 1}],
        *[{"method": "guess"}, {"within": "sight"}],
    ],
    "preflight.json": [{"pixels": "many"}, {"related": "yes"}, {"unusable": 3}, {"moved": [1.0]}, {"units": True}],
    "W0/floor.json": [{"floor": [0.5]}, {"floor": "low"}],
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_of_another_type_are_refused_also_under_a_right_checksum(name, weights, tmp_path):
    data = pal.datasets.load("digits", per_class=2, seed=0)
    truth = pal.auditing.Truth(data.train.images, (data.train.labels > 0).long())
    audit(weights, tmp_path / "audit", truth=truth, controls=False)
    path = tmp_path / "audit" / name
    owner = storage.parse_json(path.read_bytes())["owner"]
    whole = storage.load_json(path, owner=owner)
    for change in [*WRONG[name], None]:
        path.write_bytes(storage.packed_json({} if change is None else whole | change, owner=owner))
        with pytest.raises(RunFolderError):
            audit(weights, tmp_path / "audit", truth=truth, controls=False)


def test_runs_of_another_plan_are_not_mixed_in(weights, tmp_path):
    """A plan that is deleted is made again from the speed of the machine, which may be another then."""
    audit(weights, tmp_path / "audit", controls=False)
    path = tmp_path / "audit" / "W0" / "plan.json"
    owner = storage.parse_json(path.read_bytes())["owner"]
    path.write_bytes(storage.packed_json(storage.load_json(path, owner=owner) | {"steps": 5}, owner=owner))
    with pytest.raises(PalimpsestError, match="belongs to another run"):
        audit(weights, tmp_path / "audit", controls=False)
