"""The run folder when things go wrong: full disks, foreign versions, interruptions; and what its log says of them."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import palimpsest_entry
from palimpsest.cli.main import main
from palimpsest.errors import CheckpointError, RunFolderError, StorageError
from palimpsest.files import storage
from palimpsest.runs import journal
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions, reconstruct
from palimpsest.runs.report import report
from palimpsest.runs.train import TrainOptions, train
from palimpsest.solver.state import Ending

CPU = torch.device("cpu")
TRAINING = TrainOptions(data="digits", per_class=2, hidden=(5,), steps=3)
OPTIONS = ReconstructOptions(candidates=4, steps=48)
WORDS = ["--candidates", "4", "--steps", "48"]
TRAINING_WORDS = "--data digits --per-class 2 --hidden 5 --steps 3".split()


def trained(path):
    with RunFolder(path).locked(create=True) as folder:
        train(folder, TRAINING, device=CPU)
    return RunFolder(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder in which everything was done."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    folder = trained(path)
    with folder.locked():
        reconstruct(folder, OPTIONS, device=CPU)
        report(folder)
    return folder


class Interrupt(journal.Callback):
    def on_record(self, state, entry):
        if state.step == 20:
            raise KeyboardInterrupt


def images(folder):
    return {name: fields["images"] for name, fields in folder.variants().items()}


# --- full disks ------------------------------------------------------------------------------------------

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # a file that would grow beyond the limit is then an error, not a death
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from palimpsest.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_a_disk_that_fills_up_ends_in_one_sentence_and_the_same_command_goes_on(finished, tmp_path):
    """A real limit on the size of files, which the second variant's result does not keep."""
    folder = trained(tmp_path / "run")
    room = (finished.path / "reconstruction.safetensors").stat().st_size * 4 // 5  # all other files take less
    command = [sys.executable, "-c", LIMITED, str(room), "reconstruct", str(folder.path), *WORDS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 2, run.stderr
    assert os.strerror(errno.EFBIG) in last
    assert "Traceback" not in run.stderr
    assert not list(folder.path.rglob("*.part"))
    assert images(folder).keys() == {"without"}
    assert folder.checkpoint.exists()
    assert main(["reconstruct", str(folder.path), *WORDS]) == 0
    assert images(folder).keys() == {"without", "with"}
    for name, expected in images(finished).items():
        assert torch.equal(images(folder)[name], expected)


@pytest.mark.parametrize("failing", [0, 5, 11])
def test_whichever_write_fails_the_run_can_be_resumed(failing, finished, tmp_path, monkeypatch):
    folder = trained(tmp_path / "run")
    real, writes = os.fsync, iter(range(10**6))

    def full(handle):
        if next(writes) >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)), folder.locked():
            reconstruct(folder, OPTIONS, device=CPU)
    with folder.locked():
        reconstruct(folder, OPTIONS, device=CPU)
    assert all(torch.equal(images(folder)[name], expected) for name, expected in images(finished).items())
    assert (folder.path / "history.jsonl").read_text() == (finished.path / "history.jsonl").read_text()


def test_files_that_belong_together_are_replaced_together_or_not_at_all(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    storage.write_together({first: b"old", second: b"old"})
    real = os.fsync

    def full(handle):
        if os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[2].startswith(".second"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(StorageError, match="second"):
        storage.write_together({first: b"new", second: b"new"})
    assert (first.read_bytes(), second.read_bytes()) == (b"old", b"old")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_an_error_says_whether_files_were_already_replaced(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    real = os.replace

    def broken(new, path):
        if path == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(new, path)

    monkeypatch.setattr(storage.os, "replace", broken)
    for failing, intact in ((first, True), (second, False)):  # noqa: B007
        with pytest.raises(StorageError) as caught:
            storage.write_together({first: b"new", second: b"new"})
        assert ("intact" in str(caught.value)) == intact
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".part") == []


def test_work_that_would_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("palimpsest.execution.resources.available_memory", lambda: 10_000)
    assert main(["train", "--out", str(tmp_path / "run"), "--data", "digits", "--per-class", "2"]) == 2
    assert "memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- versions --------------------------------------------------------------------------------------------


OTHER_FORMATS = [storage.FORMAT - 1, storage.FORMAT + 1, str(storage.FORMAT), None]


@pytest.mark.parametrize("number", OTHER_FORMATS)
def test_json_of_another_format_is_refused(finished, tmp_path, number):
    content = json.loads((finished.path / "config.json").read_text())
    assert content["format"] == storage.FORMAT
    (tmp_path / "config.json").write_text(json.dumps(content | {"format": number}))
    with pytest.raises(RunFolderError, match="version"):
        _ = RunFolder(tmp_path).config


@pytest.mark.parametrize("number", OTHER_FORMATS)
def test_tensors_of_another_format_are_refused(finished, tmp_path, number):
    paths = [*finished.path.glob("*.safetensors"), *finished.path.glob("snapshots/*.safetensors")]
    assert len(paths) > 5
    for path in paths:
        tensors, description = storage.load_tensors(path)
        storage.save_tensors(tmp_path / path.name, tensors, description | {"format": number})
        with pytest.raises(CheckpointError, match="version"):
            storage.load_tensors(tmp_path / path.name)


def refusal(capsys, *words):
    """The one line of a command that must fail with status 2."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("palimpsest: ")]
    return line


def test_a_run_folder_of_the_previous_version_is_refused(tmp_path, monkeypatch, capsys):
    """Every file as the previous version wrote it, with sound checksums."""
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT", storage.FORMAT - 1)
        folder = trained(tmp_path / "old")
        with pytest.raises(KeyboardInterrupt), folder.locked():
            reconstruct(folder, OPTIONS, device=CPU, callbacks=lambda variant: [Interrupt()])
    for command in ("reconstruct", "report"):
        line = refusal(capsys, command, folder.path)
        assert "config.json" in line
        assert "version" in line
    assert main(["train", "--out", str(folder.path), "--again", *TRAINING_WORDS]) == 0


def test_a_checkpoint_of_the_previous_version_is_refused(tmp_path, monkeypatch, capsys):
    folder = interrupted(tmp_path / "run")
    tensors, description = storage.load_tensors(folder.checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT", storage.FORMAT - 1)
        sentence = {"outcome": Ending.FINISHED.value}  # files of format 3 held it
        storage.save_tensors(folder.checkpoint, tensors, description | sentence)
    oldest = {"palimpsest": json.dumps(description | {"format": 1})}  # before there were owners and checksums
    for old in (folder.checkpoint.read_bytes(), safetensors.torch.save(tensors, metadata=oldest)):
        folder.checkpoint.write_bytes(old)
        line = refusal(capsys, "reconstruct", folder.path, *WORDS)
        assert "checkpoint.safetensors" in line
        assert "version" in line
    assert main(["reconstruct", str(folder.path), *WORDS, "--again"]) == 0


@pytest.mark.parametrize("change", [{"loss": "none"}, {"loss": []}, {"per_class": "2"}, {"hidden": 5}, {"seed": -1}])
def test_a_config_with_nonsense_is_refused(finished, tmp_path, change, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished.path, folder)
    config = finished.config
    (folder / "config.json").write_bytes(storage.packed_json(config | {"training": config["training"] | change}))
    for command in ("reconstruct", "report"):
        assert f"training.{min(change)}" in refusal(capsys, command, folder)


# --- replacing an unfinished run -------------------------------------------------------------------------


def interrupted(path):
    """A run folder with a checkpoint."""
    folder = trained(path)
    with pytest.raises(KeyboardInterrupt), folder.locked():
        reconstruct(folder, OPTIONS, device=CPU, callbacks=lambda variant: [Interrupt()])
    assert folder.checkpoint.exists()
    return folder


OTHER = ["--candidates", "5", "--steps", "48", "--again"]


def test_a_checkpoint_stays_until_the_new_run_has_one(tmp_path, monkeypatch):
    folder = interrupted(tmp_path / "run")
    before = folder.checkpoint.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        assert main(["reconstruct", str(folder.path), *OTHER]) == 2
    assert folder.checkpoint.read_bytes() == before
    assert main(["reconstruct", str(folder.path), *WORDS]) == 0  # it can still be finished


def test_the_new_run_is_resumed_after_it_was_interrupted_or_killed(tmp_path):
    folder = interrupted(tmp_path / "run")
    options = ReconstructOptions(candidates=5, steps=48)
    with pytest.raises(KeyboardInterrupt), folder.locked():
        reconstruct(folder, options, device=CPU, callbacks=lambda variant: [Interrupt()], again=True)
    assert len(storage.load_tensors(folder.checkpoint)[0]["ids"]) == 5
    assert not folder.new_checkpoint.exists()
    folder.checkpoint.replace(folder.new_checkpoint)  # where a kill leaves it
    assert main(["reconstruct", str(folder.path), *OTHER[:-1]]) == 0
    assert "resumes at step 20" in (folder.path / "log.txt").read_text()
    assert not folder.new_checkpoint.exists()


# --- the log ---------------------------------------------------------------------------------------------


def test_the_log_tells_what_was_done(finished):
    lines = (finished.path / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} \S", line) for line in lines)
    log = "\n".join(lines)
    told = (
        *(
            "started: .*palimpsest .*torch",
            "training begins: 4 images of digits",
            "Training did not converge in 3 steps",
        ),
        *(
            "finished after",
            "started",
            "reconstruction without splitting begins",
            "ends at step 48",
            "with splitting begins",
        ),
        *("phase 1 ends at step 10: 1 of 4 candidates split", "phase 2 ends", "scoring begins", "finished after"),
    )
    assert re.search(".*".join(told), log, re.DOTALL)


def test_the_log_tells_of_interruption_resumption_and_failure(tmp_path):
    folder = trained(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), folder.locked():
        reconstruct(folder, OPTIONS, device=CPU, callbacks=lambda variant: [Interrupt()])
    with folder.locked():
        reconstruct(folder, OPTIONS, device=CPU)
    with pytest.raises(RunFolderError), folder.locked():
        raise RunFolderError("two\nlines")
    log = (folder.path / "log.txt").read_text()
    told = ("stops at step 20 of 48", "interrupted after", "resumes at step 20", "failed .two lines. after")
    assert re.search(".*".join(told), log, re.DOTALL)


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal._File, "flush", full)
    assert trained(tmp_path / "run").config
    assert not capsys.readouterr().err


def test_without_a_terminal_progress_is_told_in_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(journal, "EVERY", 0.0)
    path = str(tmp_path / "run")
    words = ["--data", "digits", "--per-class", "2", "--hidden", "5", "--steps", "60"]
    assert main(["train", "--out", path, *words]) == 0
    ended, told = capsys.readouterr()
    assert re.match(r"training begins: .*\nstep 0 of 60: loss .*\nstep 50 of 60: ", told, re.DOTALL)
    assert ended.startswith("Training did not")
    assert main(["reconstruct", path, *WORDS]) == 0
    told = capsys.readouterr().err
    assert "reconstruction without splitting begins, for 48 steps with 4 candidates\nstep 0 of 48: loss" in told
    assert "started" not in told
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["report", path]) == 0
    assert not capsys.readouterr().err


# --- wrong words, and no patience --------------------------------------------------------------------------

TRAIN = ["train", "--data", "digits", "--out"]
WRONG = {
    "--per-class": (*TRAIN, "OUT", "--per-class", "0"),
    "--steps": (*TRAIN, "OUT", "--steps", "0"),
    "--seed": (*TRAIN, "OUT", "--seed", "-1"),
    "--hidden": (*TRAIN, "OUT", "--hidden", "0"),
    "--weight-decay": (*TRAIN, "OUT", "--weight-decay", "-1"),
    "--task classes": (*TRAIN, "OUT", "--loss", "cross_entropy"),
    "--loss cross_entropy": (*TRAIN, "OUT", "--loss", "logistic", "--task", "classes"),
    "--candidates": ("reconstruct", "RUN", "--candidates", "0"),
    "--rounds": ("reconstruct", "RUN", "--rounds", "0"),
    "--share": ("reconstruct", "RUN", "--share", "2"),
    "--whitening": ("reconstruct", "RUN", "--whitening", "nan"),
}


@pytest.mark.parametrize("option", WRONG)
def test_errors_name_the_option(option, finished, tmp_path, capsys):
    places = {"OUT": tmp_path / "out", "RUN": finished.path}
    assert option in refusal(capsys, *(places.get(word, word) for word in WRONG[option]))
    assert not (tmp_path / "out").exists()


def test_names_cannot_speak_to_the_terminal(tmp_path, capsys):
    assert main(["report", str(tmp_path / "a\x1b[31m\nb\u202e")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "\x1b" not in told
    assert "\u202e" not in told


INTERRUPTED = """
import os, runpy, signal, sys

def watch(event, arguments):
    if event == "import" and arguments[0] == module:
        os.kill(os.getpid(), signal.SIGINT)

module, sys.argv = sys.argv[1], sys.argv[2:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here, as it is under nohup
sys.addaudithook(watch)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["palimpsest.cli.main", "numpy", "torch", "palimpsest.runs.train"])
def test_ctrl_c_while_importing_is_no_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED, module, palimpsest_entry.__file__, "--help"]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
