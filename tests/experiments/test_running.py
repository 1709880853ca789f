"""The parts of an experiment are run once each, in any number of runs and processes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reproduce import command, experiment, parts
from reproduce.command import main
from reproduce.parts import Part
from reproduce.runner import Curve, Runner
from tiny_experiment import TINY, arguments, beside, loaded, results_in

import palimpsest as pal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_every_part_is_there_and_none_is_run_again(tiny, capsys, monkeypatch):
    assert results_in(tiny).keys() == set(parts.of(loaded(tiny)))
    assert len(results_in(tiny)) == 2 * (6 + 8)
    for work in ("_run", "_train"):
        monkeypatch.setattr(Runner, work, lambda *_: pytest.fail("there was nothing left to do"))
    assert main(arguments(tiny)) == 0
    assert capsys.readouterr().out.count("14 of 14 parts are there") == 2


@pytest.mark.parametrize("base", ["kkt-mnist-500", "multiclass-mnist-500", "unknown-n"])
def test_other_kinds_are_run_and_resumed(tmp_path, base):
    columns = experiment.load(base).columns
    lines = [f"columns.{name} = {{ candidates = [4], steps = 16 }}" for name in columns]
    training = 'training = { data = "digits", images = 10, hidden = [12], scale = 1.0, steps = 20 }'
    (tmp_path / "tiny.toml").write_text("\n".join([f'based_on = "{base}"', "seeds = [0]", training, *lines]))
    assert main([*arguments(tmp_path), "--variant", "none"]) == 0
    assert [(part.column, part.variant) for part in results_in(tmp_path)] == [(name, "none") for name in columns]
    assert main(arguments(tmp_path)) == 0
    assert results_in(tmp_path).keys() == set(parts.of(loaded(tmp_path)))
    page = (beside(tmp_path) / "tiny.md").read_text(encoding="utf-8")
    assert all(f"| {part.column} | {part.variant} | 4 |" in page for part in results_in(tmp_path))


def test_a_part_names_the_command_and_the_commit_that_made_it(tiny):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for part, result in results_in(tiny).items():
        assert result["command"].endswith(f"tiny.toml {part.options}")
        assert head.startswith(result["commit"])


def test_only_the_missing_parts_are_run_on_the_same_network(copy, monkeypatch):
    before, missing = results_in(copy), [Part("ours", "random", 4, 1), Part("published", "splitting", 4, 0)]
    for part in missing:
        parts.path(beside(copy), part).unlink()
    monkeypatch.setattr(Runner, "_train", lambda *_: pytest.fail("the network is there"))
    assert main(arguments(copy)) == 0
    for part, result in results_in(copy).items():
        for name in ("ssim", "l2", "splits", "training"):
            assert result[name] == before[part][name]


def test_a_network_with_other_weights_is_refused(copy, capsys):
    for part in parts.of(loaded(copy)):
        path = parts.path(beside(copy), part)
        if part.variant == "random":
            path.unlink()
        else:
            weights = results_in(copy)[part]["training"]["weights"]
            path.write_text(path.read_text(encoding="utf-8").replace(weights, "trained elsewhere"))
    assert main(arguments(copy)) == 2
    assert "other weights" in capsys.readouterr().err


def test_the_controls_take_as_much_as_splitting_does(tiny):
    results = {v: results_in(tiny)[Part("ours", v, 4, 0)] for v in experiment.VARIANTS}
    split = results["splitting"]
    assert split["final candidates"] > 4
    assert results["final-k"]["final candidates"] == split["final candidates"]
    assert results["equal-compute"]["candidate-steps"] == pytest.approx(split["candidate-steps"], rel=0.1)
    assert results["final-k"]["splits"] == results["equal-compute"]["splits"] == []  # nor are schedules restarted
    assert results["random"]["final candidates"] > 4
    assert results["restarts"]["final candidates"] == results["none"]["final candidates"] == 4
    *rounds, end = results["merging"]["splits"]
    assert results["merging"]["final candidates"] == end.get("images", end["among"])
    assert len(rounds) == len(split["splits"])


def test_held_out_images_have_other_scores(tiny):
    for result in results_in(tiny).values():
        for metric in ("ssim", "l2"):
            assert len(result[f"held-out {metric}"]) == 8
            assert result[f"held-out {metric}"] != result[metric]


def test_curves_follow_the_scores_of_a_run(tiny):
    data = loaded(tiny).training.load(0)
    curve = Curve(data, every=10)
    x = data.centred(data.train.images) + 0.1 * torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for step in (0, 5, 10):
        curve.on_record(SimpleNamespace(step=step, x=x), {"step": step, "loss": 1.0, "candidates": len(x)})
    score = pal.score(x, data.train.images, mean=data.mean)
    assert [point["step"] for point in curve.points] == [0, 10]
    assert curve.points[0]["ssim"] == pytest.approx(float(score.ssim.mean()), rel=1e-5)
    assert curve.points[0]["l2"] == pytest.approx(float(score.l2.mean()), rel=1e-5)
    assert len(curve.trajectories["l2"]) == 2
    assert curve.trajectories["l2"][0].tolist() == pytest.approx(score.l2.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"ssim": [float("nan")] * 8},
        {"ssim": [0.5] * 7},
        {"l2": "far"},
        {"held-out ssim": []},
        {"training": {}},
        {"seed": 1},
    ],
)
def test_a_damaged_part_is_refused(copy, capsys, change):
    path = parts.path(beside(copy), Part("ours", "none", 4, 0))
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change))
    assert main(arguments(copy)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert path.name in line


@pytest.mark.parametrize("content", [b"[1, 2]", b"\xff{", b"{}"])
def test_a_file_that_is_not_a_part_is_refused(copy, capsys, content):
    path = parts.path(beside(copy), Part("ours", "none", 4, 0))
    path.write_bytes(content)
    assert main(arguments(copy)) == 2
    assert path.name in capsys.readouterr().err


def test_processes_come_to_the_same_results(tiny, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    assert main([*arguments(tmp_path), "--workers", "2", "--column", "ours", "--variant", "none", "final-k"]) == 0
    alone, aside = results_in(tiny), results_in(tmp_path)
    wanted = {(variant, seed) for variant in ("none", "splitting", "final-k") for seed in (0, 1)}
    assert {(part.variant, part.seed) for part in aside} == wanted
    for part, result in aside.items():
        assert result["ssim"] == pytest.approx(alone[part]["ssim"], abs=1e-3)


def test_an_error_in_a_process_is_one_sentence(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY.replace("digits", "mnist"))
    assert main([*arguments(tmp_path), "--workers", "2", "--data-root", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_budget_stops_before_a_part_that_would_not_end_in_time(copy, capsys):
    gone, long = (parts.path(beside(copy), Part("ours", v, 4, s)) for v, s in (("none", 0), ("random", 0)))
    gone.unlink()
    long.write_text(json.dumps(json.loads(long.read_text(encoding="utf-8")) | {"seconds": 1000.0}))
    assert main([*arguments(copy), "--budget", "500"]) == 0
    assert re.findall(r"parts left: (\d+)", capsys.readouterr().out) == ["1"]
    assert not gone.exists()


@pytest.mark.parametrize(
    "selection", [["--seed", "7"], ["--column", "path"], ["--variant", "restarts", "--column", "published"]]
)
def test_a_selection_without_parts_is_refused(tmp_path, capsys, selection):
    assert main(["ntk-cifar10", *selection, "--out", str(tmp_path)]) == 2
    assert "column: published, ours" in capsys.readouterr().err


def test_only_full_runs_of_the_papers_experiments_are_kept_in_the_repository(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    kept = command.job_for(experiment.load("unknown-n"), None)
    assert (kept.results, kept.pages) == (command.RESULTS / "unknown-n", command.DOCS)
    others = [experiment.load("unknown-n", small=True), experiment.load("unknown-n", tuning=True), loaded(tmp_path)]
    jobs = [command.job_for(other, None) for other in others]
    assert [str(job.results) for job in jobs] == [
        f"runs/reproduce/{name}" for name in ("unknown-n-small", "unknown-n-tuning", "tiny")
    ]


def test_tuning_uses_no_reported_image(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)

    def images(known):
        draws = [known.training.load(seed, apart_from=known.apart_from) for seed in known.seeds]
        return {x.numpy().tobytes() for d in draws for part in (d.train, d.held_out) for x in part.images}

    tuning = experiment.load(str(tmp_path / "tiny.toml"), tuning=True)
    assert tuning.seeds == experiment.TUNING_SEEDS
    assert not images(loaded(tmp_path)) & images(tuning)


def test_the_folder_is_a_command():
    folder = ROOT / "experiments" / "reproduce"
    done = subprocess.run([sys.executable, folder, "--help"], capture_output=True, text=True, check=True)
    assert "--budget" in done.stdout
