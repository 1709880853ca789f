"""Parts on the workers of a cluster: the same numbers, even if a worker dies. Without a cluster: one sentence."""

import pickle
import sys
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path

import networks_in_use.command
import pytest
import reproduce.command
import torch
from distributed import LocalCluster
from tiny_experiment import TINY, arguments, results_in

import palimpsest as pal
from audited import SHAPE, fitted_mlp, mlp, truth
from palimpsest import errors
from palimpsest.auditing import further, on_workers, speed
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.on_workers import read_on_workers
from palimpsest.auditing.options import Options
from palimpsest.auditing.plan import timed_plan, untimed_plan
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.reading import PosedByRole, read_all
from palimpsest.cli import shared
from palimpsest.cli.main import main
from palimpsest.cli.several import audit_several
from palimpsest.execution import workers
from palimpsest.execution.workers import completed

TESTS = Path(__file__).parents[1]
QUICK = {"samples": 4, "candidates": 6, "steps": 30, "restarts": 2, "tangents": 1, "control_steps": 20, "minutes": 60}
MORTAL = """
import os, signal
from multiprocessing import parent_process
from pathlib import Path
from torch import nn

class Mortal(nn.Sequential):
    calls = 0

    def forward(self, x):
        Mortal.calls += 1
        killed = Path(__file__).with_name("killed")
        if parent_process() is not None and Mortal.calls == 40 and not killed.exists():  # on a worker, in the middle
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def make():
    return Mortal(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 1))
"""


@pytest.fixture(scope="module")
def cluster():
    """Two workers, each a process with one thread."""
    options = {"processes": True, "dashboard_address": None, "host": "127.0.0.1", "silence_logs": "CRITICAL"}
    with LocalCluster(n_workers=2, threads_per_worker=1, **options) as running:
        yield running.scheduler_address


class Here(Executor):
    """Runs a part as soon as it is submitted, and keeps what was sent."""

    def __init__(self):
        self.sent = []

    def submit(self, work, sealed):
        self.sent.append(sealed)
        future = Future()
        future.set_result(work(sealed))
        return future


# --- the same numbers ----------------------------------------------------------------------------


def tensors_in(folder):
    return {path.name: pal.storage.load_tensors(path)[0] for path in (folder / "W0").rglob("*.safetensors")}


def test_an_audit_gives_the_same_numbers_on_a_cluster_although_a_worker_is_killed(cluster, tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    data = pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)
    sys.path.append(str(tmp_path))
    try:
        import mortal
    finally:
        sys.path.remove(str(tmp_path))
    torch.manual_seed(0)
    fit = pal.train(mortal.make(), data.train.images - 0.5, data.train.labels, steps=50)
    given = {"initial": fit.initial, "image_shape": SHAPE, "truth": truth(data), "rungs": ("W0",)} | QUICK
    audited = partial(pal.audit, f"{tmp_path / 'mortal.py'}:make", fit.model.state_dict(), **given)
    audited(out=tmp_path / "alone" / "audit")
    assert not (tmp_path / "killed").exists()
    with workers.cluster(cluster) as executor:
        audited(out=tmp_path / "aside" / "audit", executor=executor)
    assert (tmp_path / "killed").exists()
    alone, aside = tmp_path / "alone" / "audit", tmp_path / "aside" / "audit"
    assert (alone / "audit.json").read_bytes() == (aside / "audit.json").read_bytes()
    expected, actual = tensors_in(alone), tensors_in(aside)
    assert len(expected) == 8
    assert expected.keys() == actual.keys()
    for name, tensors in expected.items():
        assert all(torch.equal(actual[name][key], value) for key, value in tensors.items()), name


def test_an_experiment_gives_the_same_numbers_on_a_cluster(cluster, tmp_path):
    for place, options in {"alone": [], "aside": ["--cluster", cluster]}.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "tiny.toml").write_text(TINY)
        chosen = ["--column", "ours", "--variant", "none"]
        assert reproduce.command.main([*arguments(tmp_path / place), *chosen, *options]) == 0
    alone, aside = (results_in(tmp_path / place) for place in ("alone", "aside"))
    assert {part.seed for part in alone} == {0, 1}
    assert alone.keys() == aside.keys()
    for part, result in alone.items():
        assert all(aside[part][name] == result[name] for name in ("ssim", "l2", "loss")), part


def test_a_worker_that_dies_again_and_again_is_one_sentence():
    class Broken(Executor):
        def submit(self, work, sealed):
            future = Future()
            future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
            return future

    [(_, result)] = completed({"part": partial(pow, 2, 3)}, Broken())
    with pytest.raises(errors.WorkerLostError):
        result()


def test_parts_that_do_not_answer_in_time_are_cancelled():
    class Never(Executor):
        def submit(self, work, sealed):
            futures.append(Future())
            if len(futures) == 1:
                futures[0].set_result(work(sealed))
            return futures[-1]

    futures = []
    parts = completed({number: partial(pow, 2, number) for number in (3, 4)}, Never(), seconds=0.1)
    key, result = next(parts)
    assert (key, result()) == (3, 8)
    with pytest.raises(errors.NoAnswerError):
        next(parts)
    assert futures[1].cancelled()


# --- what is sent --------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path):
    ours = fitted_mlp(steps=50)
    known = truth(pal.datasets.load("digits", per_class=4, held_out_per_class=4, seed=1))
    options = Options(**QUICK)
    return Case(tmp_path, "", ours, options, known, "auto", Clock(Clock.now() + 600), executor=Here())


def planned(case):
    attacker = Attacker("W0", "ntk", "", samples=4)
    return timed_plan(untimed_plan(attacker, preflight(case.subject), case.options), case.options, None)


def test_training_images_and_the_run_folder_do_not_leave_the_machine(case):
    read_on_workers(case, planned(case), [("subject", 0)])
    assert (case.folder / "runs" / "subject-0.safetensors").exists()
    [sent] = case.executor.sent
    weights = next(iter(case.subject.model.parameters())).detach()
    assert weights.numpy().tobytes() in sent
    assert case.truth.images.numpy().tobytes() not in sent
    assert str(case.folder).encode() not in sent


def test_a_part_without_time_leaves_its_state_which_the_audit_shows(case):
    case, plan = replace(case, clock=Clock(0.0)), planned(case)
    read_on_workers(case, plan, plan.runs(controls=False))
    assert sorted(path.name for path in (case.folder / "runs").iterdir()) == [
        "subject-0.checkpoint",
        "subject-1.checkpoint",
    ]
    runs, finished = read_all(case, plan, PosedByRole(case, plan))
    assert not finished
    assert [len(runs[role]) for role in ("subject", "negative")] == [2, 0]


def test_the_time_that_is_left_goes_into_restarts_on_all_workers_at_once(tmp_path, monkeypatch):
    at_once = []

    def counted(parts, *where, **limits):
        at_once.append([*parts])
        return completed(parts, *where, **limits)

    monkeypatch.setattr(on_workers, "completed", counted)
    monkeypatch.setattr(speed, "MEASURED_SECONDS", 0.01)
    ours, quick = fitted_mlp(steps=20), {**QUICK, "restarts": None, "controls": False, "rungs": ("W0",)}
    given = {"initial": ours.initial, "image_shape": SHAPE, "out": tmp_path / "audit", "executor": Here()} | quick
    found = pal.audit(mlp, ours.model.state_dict(), **given)
    assert found.plan.restarts == further.MOST
    assert at_once[-1] == [f"subject {number}" for number in range(further.USUAL + 1, further.MOST + 1)]


def test_a_clock_counts_the_time_on_the_way(monkeypatch):
    sent = pickle.dumps(Clock(Clock.now() + 100))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    assert pickle.loads(sent).seconds_left == pytest.approx(70, abs=5)


@pytest.mark.parametrize("error", [
    errors.DivergenceError(3, "lower the rate"), errors.UnsupportedNetworkError("layer", "is odd"),
    errors.StorageError("the disk is full; make room"), errors.InvalidInputError("wrong; do this"),
])  # fmt: skip
def test_errors_keep_their_kind_and_sentence(error):
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is type(error)
    assert (str(received), vars(received)) == (str(error), vars(error))


def test_a_worker_without_the_code_of_the_network_is_told_in_one_sentence(case, tmp_path):
    (tmp_path / "gone.py").write_text("from audited import mlp as make")
    made = pal.auditing.subject(f"{tmp_path / 'gone.py'}:make", case.subject.model.state_dict(), image_shape=SHAPE)
    sealed = workers._sealed(partial(len, [made]))
    (tmp_path / "gone.py").unlink()
    with pytest.raises(errors.InvalidInputError, match="worker"):
        workers._run(sealed)


# --- without a cluster ---------------------------------------------------------------------------


def audit(tmp_path, *options):
    torch.save(fitted_mlp(steps=1).model.state_dict(), tmp_path / "final.pt")
    network = ["--network", "audited:mlp", "--shape", "1,8,8", "--out", str(tmp_path / "out")]
    return main(["audit", *network, "--weights", str(tmp_path / "final.pt"), *options])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nowhere"])
def test_a_scheduler_that_cannot_be_reached_is_one_sentence(address, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.2)
    (tmp_path / "tiny.toml").write_text(TINY)
    for command in (
        partial(audit, tmp_path, "--cluster", address),
        partial(reproduce.command.main, [*arguments(tmp_path), "--cluster", address]),
        partial(
            networks_in_use.command.main,
            ["--small", "--rows", "mlp-adam", "--results", str(tmp_path), "--cluster", address],
        ),
    ):
        assert command() == 2
        [line] = capsys.readouterr().err.splitlines()
        assert address in line
    assert not (tmp_path / "out").exists()


def test_dask_is_needed_only_for_a_cluster(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert audit(tmp_path, "--cluster", "tcp://127.0.0.1:1") == 2
    assert "palimpsest[cluster]" in capsys.readouterr().err


# --- several models ------------------------------------------------------------------------------


def test_an_interruption_stops_all_audits(tmp_path):
    def interrupted():
        with shared.resumable():
            raise KeyboardInterrupt

    audits = {"first": interrupted, "second": lambda: pytest.fail("it was not to begin")}
    with pytest.raises(shared.CommandFailedError):
        audit_several(audits, tmp_path, at_once=False)


def test_several_models_have_a_folder_each_and_a_table(tmp_path, capsys):
    initial = tmp_path / "start.pt"
    ours = fitted_mlp(steps=20)
    torch.save(ours.initial, initial)
    for name, content in {"one": ours.model.state_dict(), "two": ours.model.state_dict(), "bad": {}}.items():
        (tmp_path / name).mkdir()
        torch.save(content, tmp_path / name / "final.pt")
    models = [str(tmp_path / name / "final.pt") for name in ("one", "two", "bad")]
    quick = [word for name, value in QUICK.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = tmp_path / "audits"
    network = ["--network", "audited:mlp", "--shape", "1,8,8", "--initial", str(initial), "--rungs", "W0"]
    assert main(["audit", *network, "--out", str(out), "--weights", *models, *quick, "--no-controls"]) == 1
    rows = [line.split(",")[:2] for line in (out / "audits.csv").read_text().splitlines()]
    assert rows[0] == ["model", "headline"]
    assert [row[0] for row in rows[1:]] == ["one-final", "two-final", "bad-final"]
    assert rows[3][1] == "failed"
    assert rows[1][1] == rows[2][1] != "failed"
    assert all((out / name / "report.html").exists() for name in ("one-final", "two-final"))
