"""The run folder when things go wrong: full disks, foreign versions, interruptions; and what its log says of them."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

import palimpsest_entry
from palimpsest.cli.commands import main
from palimpsest.errors import CheckpointError, RunFolderError, StorageError
from palimpsest.files import storage
from palimpsest.runs import jobs, journal
from palimpsest.runs.folder import RunFolder

CPU = torch.device("cpu")
TRAINING = jobs.Training(data="digits", per_class=2, hidden=(5,), steps=3)
READING = jobs.Reading(candidates=4, steps=48)
WORDS = ["--candidates", "4", "--steps", "48"]


def train(path):
    with RunFolder(path).locked(create=True) as folder:
        jobs.train(folder, TRAINING, device=CPU)
    return RunFolder(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder in which everything was done."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    folder = train(path)
    with folder.locked():
        jobs.reconstruct(folder, READING, device=CPU)
        jobs.report(folder)
    return folder


def images(folder):
    return {name: fields["images"] for name, fields in folder.variants().items()}


# --- full disks ------------------------------------------------------------------------------------------

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # a file that would grow beyond the limit is then an error, not a death
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from palimpsest.cli.commands import main
sys.exit(main(sys.argv[2:]))
"""


def test_a_disk_that_fills_up_ends_in_one_sentence_and_the_same_command_goes_on(finished, tmp_path):
    """A real limit on the size of files, which the second variant's result does not keep."""
    folder = train(tmp_path / "run")
    room = (finished.path / "reconstruction.safetensors").stat().st_size * 4 // 5  # all other files take less
    command = [sys.executable, "-c", LIMITED, str(room), "reconstruct", str(folder.path), *WORDS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 2, run.stderr
    assert re.match(r"palimpsest: cannot write .*: File too large; make room", last)
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
    folder = train(tmp_path / "run")
    real, writes = os.fsync, iter(range(10**6))

    def full(handle):
        if next(writes) >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device; make room"), folder.locked():
            jobs.reconstruct(folder, READING, device=CPU)
    with folder.locked():
        jobs.reconstruct(folder, READING, device=CPU)
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
    with pytest.raises(StorageError, match=r"cannot write .*second"):
        storage.write_together({first: b"new", second: b"new"})
    assert (first.read_bytes(), second.read_bytes()) == (b"old", b"old")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_work_that_would_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("palimpsest.execution.resources.available_memory", lambda: 10_000)
    assert main(["train", "--out", str(tmp_path / "run"), "--data", "digits", "--per-class", "2"]) == 2
    assert "needs about" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "scores.json"])
@pytest.mark.parametrize("number", [storage.FORMAT - 1, storage.FORMAT + 1, str(storage.FORMAT), None])
def test_json_of_another_format_is_refused(finished, tmp_path, name, number):
    content = json.loads((finished.path / name).read_text())
    assert content["format"] == storage.FORMAT
    (tmp_path / name).write_text(json.dumps(content | {"format": number}))
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match=f"{name} was written by another version"):
        folder.config if name == "config.json" else folder.scores  # noqa: B018


@pytest.mark.parametrize("number", [storage.FORMAT - 1, storage.FORMAT + 1, str(storage.FORMAT), None])
def test_tensors_of_another_format_are_refused(finished, tmp_path, number):
    paths = [*finished.path.glob("*.safetensors"), *finished.path.glob("snapshots/*.safetensors")]
    assert len(paths) > 5
    for path in paths:
        tensors, description = storage.load_tensors(path)
        storage.save_tensors(tmp_path / path.name, tensors, description | {"format": number})
        with pytest.raises(CheckpointError, match=f"{path.name} was saved by another version"):
            storage.load_tensors(tmp_path / path.name)


@pytest.mark.parametrize("change", [{"loss": "none"}, {"loss": []}, {"per_class": "2"}, {"hidden": 5}, {"seed": -1}])
def test_a_config_with_nonsense_is_refused(finished, tmp_path, change, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished.path, folder)
    config = finished.config
    (folder / "config.json").write_bytes(storage.packed_json(config | {"training": config["training"] | change}))
    for command in ("reconstruct", "report"):
        assert main([command, str(folder)]) == 2
        assert "config.json describes another training; train into a new folder" in capsys.readouterr().err


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


class Interrupt(journal.Callback):
    def on_record(self, state, entry):
        if state.step == 20:
            raise KeyboardInterrupt


def test_the_log_tells_of_interruption_resumption_and_failure(tmp_path):
    folder = train(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), folder.locked():
        jobs.reconstruct(folder, READING, device=CPU, callbacks=lambda variant: [Interrupt()])
    with folder.locked():
        jobs.reconstruct(folder, READING, device=CPU)
    with pytest.raises(RunFolderError), folder.locked():
        raise RunFolderError("two\nlines")
    log = (folder.path / "log.txt").read_text()
    told = ("stops at step 20 of 48", "interrupted after", "resumes at step 20", "failed .two lines. after")
    assert re.search(".*".join(told), log, re.DOTALL)


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal._File, "flush", full)
    assert train(tmp_path / "run").config
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
    "--per-class is 0; give a whole number of at least 1": (*TRAIN, "OUT", "--per-class", "0"),
    "--steps is 0;": (*TRAIN, "OUT", "--steps", "0"),
    "--seed is -1; give a whole number of at least 0": (*TRAIN, "OUT", "--seed", "-1"),
    "--hidden is 0;": (*TRAIN, "OUT", "--hidden", "0"),
    "--weight-decay is -1.0; give a number that is not negative": (*TRAIN, "OUT", "--weight-decay", "-1"),
    "add --task classes": (*TRAIN, "OUT", "--loss", "cross_entropy"),
    "use --loss cross_entropy": (*TRAIN, "OUT", "--loss", "logistic", "--task", "classes"),
    "--candidates is 0;": ("reconstruct", "RUN", "--candidates", "0"),
    "--rounds is 0;": ("reconstruct", "RUN", "--rounds", "0"),
    "--share is 2.0; give a number above 0 and at most 1": ("reconstruct", "RUN", "--share", "2"),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_errors_speak_of_options(sentence, finished, tmp_path, capsys):
    places = {"OUT": str(tmp_path / "out"), "RUN": str(finished.path)}
    assert main([places.get(word, word) for word in WRONG[sentence]]) == 2
    assert sentence in capsys.readouterr().err
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


@pytest.mark.parametrize("module", ["palimpsest.cli.commands", "numpy", "torch", "palimpsest.runs.jobs"])
def test_ctrl_c_while_importing_is_no_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED, module, palimpsest_entry.__file__, "--help"]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
