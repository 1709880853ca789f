"""The command line from data to verdict, and everything a user can do wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
import torch
from PIL import Image

import palimpsest as pal
from killing import COMMAND_LINE, NEVER, Moment, struck
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError
from palimpsest.files import storage
from palimpsest.files.versions import versions
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions

SMALL = ["--per-class", "4", "--hidden", "30", "30", "--seed", "3"]
QUICK = ["--candidates", "10", "--steps", "48", "--seed", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run folder with both reconstructions and a report."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", "--out", str(folder), *SMALL]) == 0
    assert main(["reconstruct", str(folder), *QUICK]) == 0
    assert main(["report", str(folder)]) == 0
    return folder


def test_a_run_folder_holds_everything(trained):
    names = {path.name for path in trained.iterdir()}
    expected = {
        "config.json",
        "model.safetensors",
        "initial.safetensors",
        "history.jsonl",
        "scores.json",
        "report.html",
    }
    assert expected | {"reconstruction.safetensors"} <= names
    assert "checkpoint.safetensors" not in names
    lines = [json.loads(line) for line in (trained / "history.jsonl").read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"with", "without"}
    assert sum("split" in line for line in lines) == 2
    config = json.loads((trained / "config.json").read_text())
    assert config["training"]["seed"] == 3
    assert config["versions"]["torch"] == torch.__version__
    scores = json.loads((trained / "scores.json").read_text())
    assert len(scores["with"]["images"]["ssim"]) == 8
    assert scores["with"]["verdict"]["sentence"] in (trained / "report.html").read_text(encoding="utf-8")


def test_the_command_line_and_python_give_the_same_numbers(trained):
    data = pal.datasets.load("faces", per_class=4, seed=3)
    torch.manual_seed(3)
    model = pal.networks.MLP(data.image_shape, hidden=(30, 30), outputs=1)
    fit = pal.train(model, data.centred(data.train.images), data.train.labels, loss="squared")
    objective = pal.NTK(fit.model, fit.initial, at=(0.15, 0.85), weights="auto", whitening=0.5)
    rec = pal.reconstruct(
        objective,
        image_shape=data.image_shape,
        candidates=10,
        steps=48,
        seed=3,
        within=pal.span(fit.model, fit.initial).subspace,
        splitting=pal.Splitting(share=0.25, until=0.4),
    )
    score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
    variant = RunFolder(trained).variants()["with"]
    assert torch.equal(variant["images"], rec.images)
    written = json.loads((trained / "scores.json").read_text())["with"]["images"]["ssim"]
    assert written == score.ssim.tolist()


def test_what_is_finished_is_not_done_again(trained, monkeypatch):
    monkeypatch.setattr(pal, "reconstruct", lambda *_, **__: pytest.fail("there was nothing left to do"))
    assert main(["reconstruct", str(trained), *QUICK]) == 0


def test_training_again_forgets_the_old_reconstructions(tmp_path):
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), *SMALL]) == 0
    assert main(["reconstruct", str(folder), *QUICK, "--splitting", "without"]) == 0
    assert main(["train", "--out", str(folder), *SMALL]) == 2  # the same, but it would take the reading with it
    assert main(["train", "--out", str(folder), *SMALL, "--steps", "5"]) == 2
    assert len(RunFolder(folder).variants()) == 1
    assert main(["train", "--out", str(folder), *SMALL, "--steps", "5", "--again"]) == 0
    assert RunFolder(folder).variants() == {}
    assert main(["report", str(folder)]) == 2


@pytest.mark.parametrize(
    ("arguments", "loss", "method"),
    [
        (["--data", "digits", "--task", "classes"], "cross_entropy", "multiclass"),
        (["--data", "faces"], "logistic", "kkt"),
    ],
)
def test_the_margin_methods_run_from_end_to_end(arguments, loss, method, tmp_path, capsys):
    folder = str(tmp_path / "run")
    training = [*arguments, "--per-class", "3", "--hidden", "20", "--loss", loss, "--steps", "200"]
    assert main(["train", "--out", folder, *training]) == 0
    assert "KKT residual" in capsys.readouterr().out
    assert main(["reconstruct", folder, "--method", method, *QUICK]) == 0
    assert main(["report", folder]) == 0
    assert "mean SSIM" in capsys.readouterr().out


def test_what_was_read_with_other_settings_is_replaced_only_if_asked_for(tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert main(["train", "--out", folder, *SMALL, "--steps", "100"]) == 0
    arguments = ["reconstruct", folder, *QUICK, "--splitting", "without", "--within"]
    assert main([*arguments, "everywhere"]) == 0
    before = RunFolder(folder).variants()["without"]["images"]
    assert "--again" in complaint(capsys, *arguments, "span")
    assert torch.equal(RunFolder(folder).variants()["without"]["images"], before)
    assert "within" in complaint(capsys, "reconstruct", folder, *QUICK, "--splitting", "with")
    assert RunFolder(folder).variants().keys() == {"without"}
    assert main([*arguments, "span", "--again"]) == 0
    assert not torch.equal(RunFolder(folder).variants()["without"]["images"], before)


# --- wrong use ------------------------------------------------------------------------------------


def complaint(capsys, *arguments) -> str:
    """The one sentence of a command that must fail with status 2."""
    assert main([str(a) for a in arguments]) == 2
    *progress, message = capsys.readouterr().err.splitlines()
    assert message.startswith("palimpsest: ")
    assert not any(line.startswith(("palimpsest", "Traceback")) for line in progress)
    return message


def test_folders_that_are_no_run_folders(tmp_path, capsys):
    assert "nowhere" in complaint(capsys, "reconstruct", tmp_path / "nowhere")
    assert str(tmp_path) in complaint(capsys, "report", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_of_another_version(trained, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"format": 99}))
    assert "version" in complaint(capsys, "reconstruct", tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in complaint(capsys, "reconstruct", tmp_path)


def test_a_run_folder_in_use(trained, capsys):
    with RunFolder(trained).locked():
        other = subprocess.run(
            [sys.executable, "-m", "palimpsest", "report", str(trained)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert other.returncode == 2
    assert str(trained) in other.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"somebody's work")
    assert str(tmp_path) in complaint(capsys, "train", "--out", tmp_path, *SMALL)
    assert (tmp_path / "model.safetensors").read_bytes() == b"somebody's work"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_weights_are_read_without_the_images_and_a_report_wants_the_same_ones(tmp_path, capsys):
    data, out = tmp_path / "own.npz", tmp_path / "run"
    generator = np.random.default_rng(0)
    images, labels = generator.random((12, 9, 9)), np.arange(12) % 2
    np.savez(data, images=images, labels=labels)
    assert main(["train", "--out", str(out), "--data", str(data), "--per-class", "2", "--hidden", "20"]) == 0
    data.rename(tmp_path / "away.npz")
    assert main(["reconstruct", str(out), *QUICK]) == 0
    np.savez(data, images=images[::-1], labels=labels)
    capsys.readouterr()
    assert "images" in complaint(capsys, "report", out)


def test_methods_must_fit_the_loss(trained, capsys):
    assert "--method ntk" in complaint(capsys, "reconstruct", trained, "--method", "kkt", *QUICK)


@pytest.mark.parametrize(("loss", "outputs"), [("squared", 1), ("logistic", 1), ("cross_entropy", 3)])
def test_ntk_fits_every_loss(loss, outputs):
    torch.manual_seed(0)
    model = pal.networks.MLP((1, 4, 4), hidden=(6,), outputs=outputs)
    initial = {name: t + 0.1 for name, t in model.state_dict().items()}
    made, _ = ReconstructOptions(method="ntk").problem(model, initial, loss)
    assert isinstance(made, pal.NTK)
    with pytest.raises(InvalidInputError, match="--method"):
        ReconstructOptions(method="kkt" if loss == "cross_entropy" else "multiclass").problem(model, initial, loss)


def test_an_unfinished_reconstruction_is_not_reported_over(trained, capsys):
    (trained / "checkpoint.safetensors").write_bytes(b"")
    try:
        assert "checkpoint.safetensors" in complaint(capsys, "report", trained)
    finally:
        (trained / "checkpoint.safetensors").unlink()


def test_config_files_that_lack_something(trained, tmp_path, capsys):
    config = RunFolder(trained).config
    for missing in ("training", "network"):
        broken = {key: value for key, value in config.items() if key != missing}
        (tmp_path / "config.json").write_bytes(storage.packed_json(broken))
        for name in ("model.safetensors", "initial.safetensors"):
            (tmp_path / name).write_bytes((trained / name).read_bytes())
        assert missing in complaint(capsys, "reconstruct", tmp_path)


def test_damaged_weights(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL, "--steps", "5"]) == 0
    weights = tmp_path / "run" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    capsys.readouterr()
    assert "model.safetensors" in complaint(capsys, "reconstruct", tmp_path / "run")


def test_data_that_cannot_be_had(tmp_path, capsys):
    out = tmp_path / "run"
    assert "5000" in complaint(capsys, "train", "--out", out, "--data", "faces", "--per-class", "5000")
    assert "missing.npz" in complaint(capsys, "train", "--out", out, "--data", tmp_path / "missing.npz")
    assert str(tmp_path) in complaint(capsys, "train", "--out", out, "--data", "mnist", "--data-root", tmp_path)
    one_class = tmp_path / "one"
    (one_class / "only").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(one_class / "only" / "a.png")
    assert str(one_class) in complaint(capsys, "train", "--out", out, "--data", one_class)
    (one_class / "second").mkdir()
    (one_class / "second" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert "broken.png" in complaint(capsys, "train", "--out", out, "--data", one_class)
    assert not out.exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in complaint(capsys, "train", "--out", tmp_path / "file" / "run", *SMALL)


def test_a_full_disk_leaves_what_was_there(trained, capsys, monkeypatch):
    def content():
        return {path: path.read_bytes() for path in trained.iterdir() if path.is_file() and path.name != "log.txt"}

    before = content()

    def full(handle):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(storage.os, "fsync", full)
    assert os.strerror(28) in complaint(capsys, "report", trained)
    assert content() == before


def test_divergence_is_a_failure_not_wrong_use(trained, monkeypatch, capsys):
    def diverge(*arguments, **options):
        raise pal.errors.DivergenceError(7, "lower the learning rate")

    monkeypatch.setattr(pal, "reconstruct", diverge)
    assert main(["reconstruct", str(trained), "--steps", "9", "--again"]) == 1
    assert "step 7" in capsys.readouterr().err


MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
]


@pytest.mark.parametrize("error", MEMORY)
def test_memory_that_runs_out_is_told_in_one_sentence(trained, monkeypatch, capsys, error):
    def run_out(*_, **__):
        raise error

    monkeypatch.setattr("palimpsest.runs.report.report", run_out)
    assert main(["report", str(trained)]) == 1
    assert "memory" in capsys.readouterr().err


def test_an_error_of_our_own_is_not_taken_for_a_lack_of_memory(trained, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr("palimpsest.runs.report.report", fail)
    with pytest.raises(RuntimeError, match="something else"):
        main(["report", str(trained)])


def test_unknown_words_are_wrong_use(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reconstruct", "--methode", "ntk"])
    assert stop.value.code == 2


COMMANDS = ("demo", "train", "reconstruct", "report", "audit", "identify", "bench")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(COMMANDS) <= words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    told, errors = capsys.readouterr()
    assert f"usage: palimpsest {command}" in told
    assert not errors


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    for folder in (torn, whole):
        assert main(["train", "--out", str(folder), *SMALL, "--steps", "50"]) == 0
    reading = ["--candidates", "10", "--steps", "400", "--seed", "3", "--splitting", "with"]

    def reconstruct(folder, moment):
        return struck([COMMAND_LINE, "reconstruct", folder, *reading], folder, moment, signal.SIGINT)

    interrupted = reconstruct(torn, Moment("snapshots", 20))
    assert interrupted.returncode == 1
    assert "Traceback" not in interrupted.stderr
    assert (torn / "checkpoint.safetensors").exists()
    assert [reconstruct(folder, NEVER).returncode for folder in (torn, whole)] == [0, 0]
    assert not (torn / "checkpoint.safetensors").exists()
    images = [RunFolder(folder).variants()["with"]["images"] for folder in (torn, whole)]
    assert torch.equal(*images)


def test_help_tells_of_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--version" in capsys.readouterr().out


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"palimpsest {pal.__version__}\n"


def test_a_mode_that_the_device_lacks_is_refused_in_one_sentence(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL, "--steps", "5"]) == 0
    capsys.readouterr()
    assert main(["reconstruct", str(tmp_path / "run"), "--mode", "graph", "--device", "cpu"]) == 2
    assert "CUDA" in capsys.readouterr().err


def test_an_interrupted_reading_is_not_trained_over(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), *SMALL]) == 0
    assert main(["train", "--out", str(folder), *SMALL]) == 0  # the same again loses nothing
    (folder / "checkpoint.safetensors").write_bytes(b"the state of an interrupted run")
    assert "--again" in complaint(capsys, "train", "--out", folder, *SMALL, "--seed", 9)
    assert (folder / "checkpoint.safetensors").exists()


def test_replacing_one_variant_leaves_no_other_that_does_not_go_with_it(tmp_path):
    folder = str(tmp_path / "run")
    assert main(["train", "--out", folder, *SMALL, "--steps", "100"]) == 0
    assert main(["reconstruct", folder, *QUICK]) == 0
    assert main(["reconstruct", folder, *QUICK, "--seed", "4", "--splitting", "with", "--again"]) == 0
    assert RunFolder(folder).variants().keys() == {"with"}
    assert main(["report", folder]) == 0


@pytest.mark.parametrize("points", [[], ["7"]])
def test_no_tangent_points_and_those_beyond_the_path_are_refused(trained, capsys, points):
    assert "--at" in complaint(capsys, "reconstruct", trained, "--at", *points)


def test_versions_are_known_without_an_installation(monkeypatch):
    def version(name):
        if name == "palimpsest":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    assert versions()["palimpsest"] == pal.__version__
