"""The experiments: that their files make sense, and that one runs, resumes and is summed up."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.reproduce import Options, experiment, figures, findings, reproduce, scoreboard, summary
from palimpsest.reproduce.__main__ import main
from palimpsest.reproduce.runner import Curve, Part, Runner
from palimpsest.solver import Settings

TINY = """
based_on = "ntk-cifar10"
title = "Tiny"
paper = "Of 25 images 21 gain SSIM by splitting."
seeds = [0, 1]
goals = [
  { column = "ours", variant = "none", candidates = 4, measure = "mean SSIM", at_least = 2.0 },
  { column = "ours", variant = "splitting", candidates = 4, measure = "% better than unsplit", at_least = 0 },
]
training = { data = "digits", images = 8, hidden = [12], steps = 50 }

[columns.published]
candidates = [4]
steps = 24

[columns.ours]
candidates = [4]
steps = 24
variants = ["none", "splitting", "merging", "restarts", "random", "duplicate", "final-k", "equal-compute"]
merging = { alike = 0.95, dead = 0.01, counting = true }
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder in which all parts of a tiny experiment were run, and summed up beside them."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "tiny.toml").write_text(TINY)
    assert main(arguments(folder)) == 0
    return folder


def arguments(folder):
    return [str(folder / "tiny.toml"), "--out", str(folder / "runs"), "--docs", str(folder / "docs")]


def beside(folder):
    """Where a tiny experiment is summed up."""
    return folder / "runs" / "tiny"


def runner_in(folder):
    return Runner(experiment.load(str(folder / "tiny.toml")), folder / "runs" / "tiny")


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
@pytest.mark.parametrize("name", experiment.names())
def test_every_experiment_is_well_described(name, small):
    known = experiment.load(name, small=small)
    path = set() if known.training.loss == "squared" else {"path"}  # which the NTK method reads anyhow
    assert set(known.columns) == {"published", "ours"} | path
    assert known.training.data in (("faces", "digits") if small else ("mnist", "cifar10", "cifar10-test"))
    assert known.training.task == "binary" or known.training.data != "faces"  # of which there are two kinds
    assert known.metric == ("l2" if "mnist" in name else "ssim")
    assert known.pictured == (
        30 if name.startswith("kkt") else 15 if name.startswith("multiclass") else 25
    )  # the paper's
    assert known.paper
    for column in known.columns.values():
        without_controls = {"ntk-cifar10-200", "ntk-cifar10-500", "ntk-cifar10-unseen", "unknown-n"}
        controls = set() if column.from_initial or name in without_controls else {"final-k", "equal-compute"}
        assert {"none", "splitting"} | controls <= set(column.variants) <= set(experiment.VARIANTS)
        for variant in column.variants:
            settings = column.settings(torch.zeros(1)) | column.policy(variant)
            Settings(candidates=column.candidates[0], steps=column.steps, **settings)
    published, ours = known.columns["published"], known.columns["ours"]
    assert published.schedule == "constant"
    assert published.sharpness[0] == published.sharpness[1]
    assert "TotalVariation" in ours.priors
    assert "TotalVariation" not in published.priors
    rows = {(name, v, k) for name, c in known.columns.items() for v in c.variants for k in c.candidates}
    assert all((goal.column, goal.variant, goal.candidates) in rows for goal in known.goals)
    assert all(goal.measure in {*summary.MEASURES, summary.IMPROVED} for goal in known.goals)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title = 3 4", "is not a TOML file"),
        ('based_on = "ntk-cifar10"\nmood = "good"', "mood is unknown"),
        ('title = "nothing else"', "columns is missing"),
        ('based_on = "x"', "no experiment 'x'"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.variants = ["none", "spliting"]', "the variant spliting is unknown"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.splitting = { rouds = 2 }', "rouds"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.splitting = { rounds = 0 }', "splitting needs rounds"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.priors = { TotalVaration = {} }', "TotalVaration"),
        ('based_on = "ntk-cifar10"\nmetric = "SSIM"', "metric is 'SSIM', and not ssim or l2"),
        ('based_on = "ntk-cifar10"\nseeds = 0', "seeds is 0, and not a list"),
        ('based_on = "wrong.toml"', "based on itself"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, complaint, capsys):
    (tmp_path / "wrong.toml").write_text(text)
    assert main([str(tmp_path / "wrong.toml"), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_file_may_not_take_the_name_of_an_experiment(tmp_path):
    (tmp_path / "unknown-n.toml").write_text('based_on = "ntk-cifar10"')
    with pytest.raises(InvalidInputError, match="give it another"):
        experiment.load(str(tmp_path / "unknown-n.toml"))


def test_a_file_is_based_on_another_beside_it(tmp_path):
    (tmp_path / "one.toml").write_text('based_on = "ntk-cifar10"\ntitle = "One"')
    (tmp_path / "two.toml").write_text('based_on = "one.toml"')
    assert experiment.load(str(tmp_path / "two.toml")).title == "One"


def test_what_the_paper_says_and_what_is_aimed_at_are_not_inherited(tmp_path):
    (tmp_path / "own.toml").write_text('based_on = "ntk-cifar10"\ntitle = "Mine"')
    own = experiment.load(str(tmp_path / "own.toml"))
    assert (own.paper, own.goals) == ("", ())
    assert own.columns == experiment.load("ntk-cifar10").columns


def test_the_module_needs_neither_the_command_line_nor_downloads():
    hide = "import sys; sys.modules.update(tyro=None, pooch=None, skimage=None, sklearn=None)"
    show = "from palimpsest.reproduce.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", f"{hide}; {show}"], capture_output=True, text=True, check=True)
    assert "--budget" in done.stdout


# --- running ------------------------------------------------------------------------------------


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
    split.write_text(json.dumps(json.loads(split.read_text()) | {"final candidates": 5}))
    assert runner.done(Part("ours", "final-k", 4, 0)) is None
    assert runner.done(Part("ours", "equal-compute", 4, 0)) is not None
    split.unlink()
    assert runner.done(Part("ours", "equal-compute", 4, 0)) is None
    assert runner.done(Part("ours", "random", 4, 0)) is not None


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
        first.communicate(timeout=60)  # returns when the last process that could write has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)


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
    long.write_text(json.dumps(json.loads(long.read_text()) | {"seconds": 1000.0}))
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


# --- summing up ---------------------------------------------------------------------------------


def test_the_results_hold_every_number_and_small_figures(tiny):
    results = beside(tiny) / "results"
    content = json.loads((results / "tiny.json").read_text())
    assert len(content["parts"]) == 28
    assert content["missing"] == {}
    assert all(len(part["ssim"]) == 8 for part in content["parts"])
    row = next(row for row in content["rows"] if (row["column"], row["variant"]) == ("ours", "splitting"))
    scores = [part["ssim"] for part in content["parts"] if (part["column"], part["variant"]) == ("ours", "splitting")]
    assert row["mean SSIM"] == pytest.approx(sum(map(sum, scores)) / 16, rel=1e-4)
    assert row["seeds"] == [0, 1]
    against = [t["against"] for t in content["tests"] if (t["column"], t["variant"]) == ("ours", "splitting")]
    assert against == [name for name in experiment.VARIANTS if name != "splitting"]
    test = next(
        t for t in content["tests"] if (t["column"], t["variant"], t["against"]) == ("ours", "splitting", "none")
    )
    mean, improved = (goal["measured"] for goal in content["goals"])
    assert mean == next(
        row["mean SSIM"] for row in content["rows"] if (row["column"], row["variant"]) == ("ours", "none")
    )
    assert improved == row[summary.IMPROVED] == pytest.approx(100 * test["of all"][0] / 16)
    assert all((row[summary.IMPROVED] is None) == (row["variant"] == "none") for row in content["rows"])
    assert sorted(content["figures"]) == ["tiny-curves.png", "tiny-images.png", "tiny-trajectories.png"]
    assert all(0 < (results / name).stat().st_size < 250_000 for name in content["figures"])


def test_the_scoreboard_says_what_was_found(tiny):
    (beside(tiny) / "results" / "other.json").write_text('{"command": "something else"}')
    page = scoreboard.write(beside(tiny)).read_text()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == ["At a glance", "How to read this page", "tiny"]
    assert "## tiny\n\nTiny." in page
    assert "28 of 28 parts have been run" in page
    assert "**The paper:** Of 25 images 21 gain SSIM by splitting." in page
    assert "**not reached**" in page
    assert "--column ours --variant equal-compute --candidates 4</pre>" in page
    assert "ours, k = 4: splitting " in page


def test_the_scoreboard_begins_with_all_columns_side_by_side(tiny):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text())
    of = {(row["column"], row["variant"]): f"{row['mean SSIM']:.3f}" for row in content["rows"]}
    published = f"{of['published', 'none']} → {of['published', 'splitting']}"
    ours = f"{of['ours', 'none']} → {of['ours', 'splitting']} → {of['ours', 'merging']}"
    assert f"| tiny | 8 | mean SSIM | {published} | {ours} |" in scoreboard.page([content])


def test_the_scoreboard_compares_splitting_with_everything(tiny):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text())
    fixed = {"none": (15, 1, "better"), "random": (8, 8, "even"), "duplicate": (1, 15, "worse")}
    content["tests"] = [
        {"column": "ours", "candidates": 4, "variant": v, "against": other, "better": b, "worse": w, "p": 0.5}
        | {"verdict": verdict, "by seed": [[b, w]], "of all": [b, w], "unsplit": 0, "top": 2, "top better": 1}
        | {"mean SSIM": [0.5, 0.6], "recovered": [3.0, 4.0]}
        for v in ("merging", "splitting")
        for other, (b, w, verdict) in fixed.items()
    ]
    page = scoreboard.page([content])
    assert "| splitting | column | k | none | random | duplicate |" in page
    assert "| tiny | ours | 4 | ↑\u00a015:1 | 8:8 | ↓\u00a01:15 |" in page
    assert "| ours | 1 / 0 / 0 | 0 / 1 / 0 | 0 / 0 / 1 |" in page


def test_a_file_of_ones_own_is_summed_up_beside_its_parts(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (beside(tmp_path) / "scoreboard.md").unlink()
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    page = (beside(tmp_path) / "scoreboard.md").read_text()
    assert f"palimpsest reproduce {tmp_path / 'tiny.toml'} --column" in page
    assert "Every experiment of the paper" not in page
    assert not (tmp_path / "docs").exists()


def test_the_documents_lose_nothing_that_was_summed_up(tiny, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(experiment, "names", lambda: (str(tmp_path / "tiny.toml"),))
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    summed_up = tmp_path / "docs" / "results" / "tiny.json"
    before = summed_up.read_text()
    (beside(tmp_path) / "ours-random-k4-seed0.json").unlink()
    assert main([*arguments(tmp_path), "--summarise"]) == 2
    assert "has parts that" in capsys.readouterr().err
    assert summed_up.read_text() == before


def test_results_of_another_version_are_refused(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (beside(tmp_path) / "results" / "other.json").write_text('{"scoreboard": 1}')
    with pytest.raises(InvalidInputError, match=r"other\.json is of another version"):
        scoreboard.write(beside(tmp_path))


def test_the_scoreboard_is_what_the_results_say(tmp_path):
    docs = Path(__file__).parents[1] / "docs"
    shutil.copytree(docs / "results", tmp_path / "results")
    assert scoreboard.write(tmp_path).read_text() == (docs / "scoreboard.md").read_text()


def test_what_was_not_run_is_said(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for name in ("ours-random-k4-seed0", "ours-random-k4-seed1", "published-none-k4-seed1"):
        (tmp_path / "runs" / "tiny" / f"{name}.json").unlink()
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    page = (beside(tmp_path) / "scoreboard.md").read_text()
    assert "Parts that were not run yet: published: none 1; ours: random 2." in page


def test_images_without_splitting_are_shown_across_and_with_it_up(tiny):
    runner, drawn = runner_in(tiny), []
    results = {part: runner.done(part) for part in runner.parts()}
    panel = SimpleNamespace(plot=lambda *points, **_: drawn.append(points[:2]))
    figures._scatter(panel, runner, results, Part("ours", "none", 4, 0), "red")
    [(across, up)] = drawn
    for values, variant in ((across, "none"), (up, "splitting")):
        assert list(values) == [s for seed in (0, 1) for s in results[Part("ours", variant, 4, seed)]["ssim"]]


def test_the_sign_test_counts_and_ignores_ties():
    assert summary.sign_test([1.0] * 9 + [-1.0] + [0.0] * 5) == {"better": 9, "worse": 1, "p": pytest.approx(22 / 1024)}
    assert summary.sign_test([0.0])["p"] == 1.0


def results_of(values, *, metric="ssim", held_out=0.0, weights="same", splits=2):
    """One result for each (variant, seed), with the given scores."""
    rest = {
        "held-out ssim": [held_out],
        "training": {"weights": weights},
        "splits": [{"split": splits}],
        "recovered": 1,
    }
    return {
        Part("ours", variant, 4, seed): {"ssim": scores, metric: scores} | rest
        for (variant, seed), scores in values.items()
    }


def test_images_are_compared_with_themselves_on_every_seed():
    with_, without = [0.5, 0.6, 0.7, 0.8], [0.4, 0.7, 0.6, 0.8]
    values = {("splitting", 0): with_, ("none", 0): without, ("splitting", 1): with_, ("none", 2): without}
    [test] = summary._tests(results_of(values), "ssim")
    assert (test["better"], test["worse"], test["by seed"], test["of all"]) == (2, 1, [[2, 1]], [2, 1])
    assert (test["top"], test["top better"], test["unsplit"]) == (3, 2, 0)
    [test] = summary._tests(results_of(values, metric="l2", splits=0), "l2")  # where less is better
    assert (test["better"], test["worse"], test["unsplit"]) == (1, 2, 1)


def test_an_image_counts_if_a_run_shows_it_better_than_all_that_were_held_out():
    values = {("splitting", 0): [0.3, 0.6, 0.7, 0.5], ("none", 0): [0.2, 0.1, 0.8, 0.4]}
    results = results_of(values, held_out=0.5)
    [test] = summary._tests(results, "ssim")
    assert (test["better"], test["worse"], test["of all"]) == (1, 1, [3, 1])
    results[Part("ours", "none", 4, 0)]["held-out ssim"] = [0.1, 0.75]  # the bar is the higher of both runs'
    [test] = summary._tests(results, "ssim")
    assert (test["better"], test["worse"], test["of all"]) == (0, 1, [3, 1])


def test_the_best_images_are_those_with_the_better_score_in_either_run():
    best, rest = [0.9] * summary.TOP, [0.1] * 10
    values = {("splitting", 0): best + rest, ("none", 0): [0.8] * summary.TOP + [0.2] * 10}
    [test] = summary._tests(results_of(values), "ssim")
    assert (test["top better"], test["top"]) == (summary.TOP, summary.TOP)


def test_only_what_was_read_from_the_same_weights_is_compared():
    one = results_of({("splitting", 0): [0.5], ("none", 0): [0.4]})
    other = results_of({("splitting", 0): [0.5]}, weights="other")
    parts = [Part("ours", "splitting", 4, seed) for seed in (0, 1)]
    assert summary._tests(one, "ssim")
    assert not summary._tests(one | other, "ssim")
    assert summary._improved(one, "ssim", parts) == 100.0
    assert summary._improved(one | other, "ssim", parts) is None
    assert summary._improved(one | results_of({("splitting", 1): [0.5]}), "ssim", parts) is None


@pytest.mark.parametrize(
    ("measure", "value"),
    [("mean SSIM", 0.65), ("above 0.4", 20), ("above 0.9", 10), ("mean L2", 16.5), ("best-25 L2", 13.0)],
)
def test_measures_are_of_all_images(measure, value):
    result = {"ssim": [0.3] * 10 + [0.7] * 10 + [0.95] * 10, "l2": list(range(32, 0, -1))}
    assert summary.MEASURES[measure](result) == pytest.approx(value)


@pytest.mark.parametrize(
    ("by_seed", "verdict"),
    [
        ([(20, 5), (20, 5), (20, 5)], "better"),
        ([(5, 20), (5, 20), (5, 20)], "worse"),
        ([(25, 0), (25, 0), (12, 13)], "even"),  # one seed points elsewhere
        ([(25, 0), (25, 0), (10, 10)], "even"),  # one points nowhere
        ([(20, 5), (20, 5), (0, 0)], "even"),  # on one nothing was split
        ([(14, 11), (14, 11), (14, 11)], "even"),
        ([(25, 0)], "even"),  # one seed cannot agree with others
    ],
)
def test_a_difference_is_one_where_every_seed_agrees(by_seed, verdict):
    pairs = {
        seed: [summary.Pair(0.0, gain, True) for gain in [1.0] * b + [-1.0] * w] for seed, (b, w) in enumerate(by_seed)
    }
    assert summary._compared(pairs)["verdict"] == verdict


@pytest.mark.parametrize(
    ("verdict", "words"), [("better", "helps"), ("worse", "hurts"), ("even", "makes no clear difference")]
)
def test_a_finding_is_plain(verdict, words):
    test = {"better": 9, "worse": 1, "p": 0.001, "top": 25, "top better": 21, "verdict": verdict}
    test |= {"by seed": [[9, 1], [0, 0] if verdict != "even" else [1, 2]], "of all": [40, 30], "unsplit": 1}
    test |= {"mean SSIM": [0.5, 0.6], "recovered": [3.0, 4.5]}
    tests = [test | {"against": against} for against in ("none", "random")]
    sentence = findings.comparison("ours", 60, "splitting", tests, seeds=3)
    assert "mean SSIM 0.5 → 0.6; recovered 3 → 4.5" in sentence
    assert "better on 9 images, worse on 1," in sentence
    assert "with those that were not read, 40 and 30" in sentence
    assert "on 1 of 2 seeds nothing was split" in sentence
    assert ("seeds disagree" in sentence) == (verdict == "even")
    assert f"splitting {words}** (2 of 3 seeds):" in sentence
    assert "21 of 25" in sentence
    assert sentence.endswith("random (2 of 3 seeds).")
