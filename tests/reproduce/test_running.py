"""The parts of an experiment are run once each, in any number of sittings and processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from tiny_experiment import TINY, arguments, runner_in

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.reproduce import Options, command, experiment, reproduce
from palimpsest.reproduce.__main__ import main
from palimpsest.reproduce.runner import Curve, Part, Runner


def test_every_part_is_there_and_none_is_done_again(tiny, capsys, monkeypatch):
    runner = runner_in(tiny)
    assert len(runner.parts()) == 2 * (6 + 8)
    assert all(runner.done(part) for part in runner.parts())
    for work in ("_run", "_train"):
        monkeypatch.setattr(Runner, work, lambda *_: pytest.fail("there was nothing left to do"))
    assert runner.network(0)[2]["weights"] == runner.done(runner.parts()[0])["training"]["weights"]
    assert main(arguments(tiny)) == 0
    assert "28 of 28 parts are there" in capsys.readouterr().out


def test_the_controls_take_as_much_as_splitting_does(tiny):
    runner = runner_in(tiny)
    results = {v: runner.done(Part("ours", v, 4, 0)) for v in experiment.VARIANTS}
    split = results["splitting"]
    assert split["final candidates"] > 4
    assert results["final-k"]["candidates"] == split["final candidates"]
    assert results["equal-compute"]["candidate-steps"] == pytest.approx(split["candidate-steps"], rel=0.1)
    assert results["final-k"]["splits"] == results["equal-compute"]["splits"] == []  # nor are schedules restarted
    assert results["random"]["final candidates"] > 4
    assert results["restarts"]["final candidates"] == results["none"]["final candidates"] == 4
    *rounds, end = results["merging"]["splits"]
    assert results["merging"]["final candidates"] == end.get("images", end["among"])
    assert len(rounds) == len(split["splits"])


def test_curves_follow_the_scores_of_a_run(tiny):
    runner = runner_in(tiny)
    data = runner.data(0)
    curve = Curve(data, every=10)
    x = data.centred(data.train.images) + 0.1 * torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for step in (0, 5, 10):
        state = SimpleNamespace(step=step, x=x)
        curve.on_record(state, {"step": step, "loss": 1.0, "candidates": len(x)})
    score = pal.score(x, data.train.images, mean=data.mean)
    assert [point["step"] for point in curve.points] == [0, 10]
    assert curve.points[0]["ssim"] == pytest.approx(float(score.ssim.mean()), rel=1e-5)
    assert curve.points[0]["l2"] == pytest.approx(float(score.l2.mean()), rel=1e-5)
    assert len(curve.trajectories["l2"]) == 2
    assert curve.trajectories["l2"][0] == pytest.approx(score.l2.tolist(), abs=1e-3)


def test_a_part_that_the_file_asks_for_otherwise_is_done_again(tiny, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.replace("steps = 24\nvariants", "steps = 25\nvariants"))
    changed = Runner(experiment.load(str(tmp_path / "tiny.toml")), tiny / "runs" / "tiny")
    assert changed.done(Part("ours", "none", 4, 0)) is None
    assert changed.done(Part("published", "none", 4, 0)) is not None


def test_a_control_that_took_as_much_as_another_splitting_is_done_again(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    runner, split = runner_in(tmp_path), tmp_path / "runs" / "tiny" / "ours-splitting-k4-seed0.json"
    split.write_text(json.dumps(json.loads(split.read_text(encoding="utf-8")) | {"final candidates": 5}))
    assert runner.done(Part("ours", "final-k", 4, 0)) is None
    assert runner.done(Part("ours", "equal-compute", 4, 0)) is not None
    split.unlink()
    assert runner.done(Part("ours", "equal-compute", 4, 0)) is None
    assert runner.done(Part("ours", "random", 4, 0)) is not None


def spoilt(name, value):
    def spoil(folder):
        path = folder / "ours-none-k4-seed0.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {name: value}))

    return spoil


def without_facts(folder):
    (folder / "ours-none-k4-seed0.json").unlink()  # or else nothing is read from the network
    path = folder / "networks" / "seed0.safetensors"
    tensors, description = pal.storage.load_tensors(path)
    pal.storage.save_tensors(path, tensors, description | {"facts": {}})


def with_other_weights(folder):
    (folder / "ours-none-k4-seed0.json").unlink()
    path = folder / "networks" / "seed0.safetensors"
    pal.storage.save_tensors(path, {"layers.0.weight": torch.zeros(1)}, pal.storage.load_tensors(path)[1])


def without_pictures(folder):
    path = folder / "pictures" / "ours-none-k4-seed0.safetensors"
    pal.storage.save_tensors(path, {"truth": torch.zeros(1)}, pal.storage.load_tensors(path)[1])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "ours-none-k4-seed0.json").write_text("[1, 2]"),
        lambda folder: (folder / "ours-none-k4-seed0.json").write_bytes(b"\xff{"),
        spoilt("ssim", [float("nan")] * 8),
        spoilt("ssim", [5.0] * 8),
        spoilt("ssim", [0.5] * 7),
        spoilt("ssim", "high"),
        spoilt("l2", [-1.0] * 8),
        spoilt("held-out ssim", []),
        spoilt("training", {"weights": 3}),
        spoilt("splits", [3]),
        spoilt("curve", [{"step": 0}]),
        spoilt("trajectories", [[0.5]]),
        spoilt("seconds", "long"),
        spoilt("final candidates", 2.5),
        without_facts,
        with_other_weights,
        without_pictures,
    ],
)
def test_files_with_wrong_content_are_refused_in_one_sentence(spoil, tiny, tmp_path, capsys):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / "runs" / "tiny")
    assert main(arguments(tmp_path)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "seed0" in line
    assert "delete it" in line


def test_merging_concerns_no_other_variant(tiny, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.replace("merging = {", "# merging = {"))
    without = Runner(experiment.load(str(tmp_path / "tiny.toml")), tiny / "runs" / "tiny")
    done = {variant: without.done(Part("ours", variant, 4, 0)) is not None for variant in experiment.VARIANTS}
    assert done == {variant: variant != "merging" for variant in experiment.VARIANTS}


def test_processes_side_by_side_come_to_the_same(tiny, tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(Runner, "_run", lambda *_: pytest.fail("another process was to do this"))
    assert main([*arguments(tmp_path), "--workers", "2", "--column", "ours", "--variant", "none", "final-k"]) == 0
    alone, aside = runner_in(tiny), runner_in(tmp_path)
    done = [part for part in aside.parts() if aside.done(part)]
    assert {(part.variant, part.seed) for part in done} == {
        (v, s) for v in ("none", "splitting", "final-k") for s in (0, 1)
    }
    for part in done:
        assert aside.done(part)["ssim"] == pytest.approx(alone.done(part)["ssim"], abs=1e-3)


def test_processes_end_with_the_first_even_if_it_is_killed(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.replace("steps = 24\n", "steps = 200_000\n"))
    command = [sys.executable, "-m", "palimpsest.reproduce", *arguments(tmp_path), "--workers", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    for _ in range(2):
        first.stdout.readline()  # both are at work
    first.kill()
    try:
        first.communicate(timeout=600)  # returns when the last process that could write has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)


def test_processes_ignore_ctrl_c_where_the_first_does():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        with get_context("spawn").Pool(1, initializer=command._share, initargs=(1,)) as pool:
            assert pool.apply(signal.getsignal, (signal.SIGINT,)) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_goes_wrong_in_a_process_is_told_by_the_first(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY.replace("digits", "mnist"))
    assert main([*arguments(tmp_path), "--workers", "2", "--data-root", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert len(complaint.splitlines()) == 1
    assert "tiny.toml, seed " in complaint


@pytest.mark.parametrize(("workers", "left"), [(1, ["28"]), (2, ["14", "14"])])
def test_no_part_is_begun_after_the_budget(tmp_path, capfd, workers, left):
    (tmp_path / "tiny.toml").write_text(TINY)
    assert main([*arguments(tmp_path), "--budget", "-1", "--workers", str(workers)]) == 0
    assert re.findall(r"parts left: (\d+)", capfd.readouterr().out) == left
    assert not list((tmp_path / "runs" / "tiny").glob("*.json"))


def test_a_budget_stops_before_a_part_that_would_not_end_in_time(tiny, tmp_path, capsys):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "tiny"
    for name in ("published-none-k4-seed0", "ours-none-k4-seed0"):
        (folder / f"{name}.json").unlink()
    long = folder / "ours-random-k4-seed1.json"
    long.write_text(json.dumps(json.loads(long.read_text(encoding="utf-8")) | {"seconds": 1000.0}))
    assert main([*arguments(tmp_path), "--budget", "500"]) == 0
    assert "parts left: 1;" in capsys.readouterr().out
    assert (folder / "published-none-k4-seed0.json").exists()


def test_a_selection_that_selects_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"the seed 7; .*column: published, ours.*seed: 0, 1, 2"):
        reproduce(Options(("ntk-cifar10",), seed=(7,), out=tmp_path))
    with pytest.raises(InvalidInputError, match="the column path"):
        reproduce(Options(("ntk-cifar10", "ntk-mnist"), column=("path",), out=tmp_path))
    with pytest.raises(InvalidInputError, match="all that was asked for"):
        reproduce(Options(("unknown-n",), column=("published",), variant=("merging",), out=tmp_path))
    with pytest.raises(InvalidInputError, match="run it without --summarise first"):
        reproduce(Options(("ntk-cifar10",), summarise=True, out=tmp_path, docs=tmp_path))
    with pytest.raises(InvalidInputError, match="give no columns"):
        reproduce(Options(("ntk-cifar10",), summarise=True, seed=(0,), out=tmp_path, docs=tmp_path))
    with pytest.raises(InvalidInputError, match="name an experiment"):
        reproduce(Options(()))
    with pytest.raises(InvalidInputError, match="give one or more"):
        reproduce(Options(("ntk-cifar10",), workers=0, out=tmp_path))


def test_tuning_sees_no_reported_image(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    known = experiment.load(str(tmp_path / "tiny.toml"))
    reported, tuning = Runner(known, tmp_path / "a"), Runner(known, tmp_path / "b", tuning=True)
    assert {part.seed for part in tuning.parts()} == set(experiment.TUNING_SEEDS)

    def images(runner):
        draws = [runner.data(seed) for seed in runner.seeds]
        return {x.numpy().tobytes() for d in draws for part in (d.train, d.held_out) for x in part.images}

    assert not images(reported) & images(tuning)
