"""What was run is compared, summed up and shown as it is."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_experiment import arguments, beside, runner_in

from palimpsest.errors import InvalidInputError
from palimpsest.reproduce import experiment, figures, findings, scoreboard, summary
from palimpsest.reproduce.__main__ import main
from palimpsest.reproduce.runner import Part, Runner

DOCS = Path(__file__).parents[2] / "docs"


def test_the_results_hold_every_number_and_small_figures(tiny):
    results = beside(tiny) / "results"
    content = json.loads((results / "tiny.json").read_text(encoding="utf-8"))
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
    page = scoreboard.write(beside(tiny)).read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", page, re.MULTILINE) == ["At a glance", "How to read this page", "tiny"]
    assert "## tiny\n\nTiny." in page
    assert "28 of 28 parts have been run" in page
    assert "**The paper:** Of 25 images 21 gain SSIM by splitting." in page
    assert "**not reached**" in page
    assert "--column ours --variant equal-compute --candidates 4</pre>" in page
    assert "ours, k = 4: splitting " in page


def test_the_scoreboard_begins_with_all_columns_side_by_side(tiny):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text(encoding="utf-8"))
    of = {(row["column"], row["variant"]): f"{row['mean SSIM']:.3f}" for row in content["rows"]}
    published = f"{of['published', 'none']} → {of['published', 'splitting']}"
    ours = f"{of['ours', 'none']} → {of['ours', 'splitting']} → {of['ours', 'merging']}"
    assert f"| tiny | 8 | mean SSIM | {published} | {ours} |" in scoreboard.page([content])


def test_the_scoreboard_compares_splitting_with_everything(tiny):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text(encoding="utf-8"))
    fixed = {"none": (15, 1, "better"), "random": (8, 8, "even"), "duplicate": (1, 15, "worse")}
    content["tests"] = [
        {"column": "ours", "candidates": 4, "variant": v, "against": other, "better": b, "worse": w, "p": 0.5}
        | {"verdict": verdict, "by seed": [[b, w]] * 2, "of all": [b, w], "unsplit": 0, "top": 2, "top better": 1}
        | {"mean SSIM": [0.5, 0.6], "recovered": [3.0, 4.0]}
        for v in ("merging", "splitting")
        for other, (b, w, verdict) in fixed.items()
    ]
    page = scoreboard.page([content])
    assert "| splitting | column | k | none | random | duplicate |" in page
    assert "| tiny | ours | 4 | ↑\u00a015:1 | 8:8 | ↓\u00a01:15 |" in page
    assert "| ours | 1 / 0 / 0 | 0 / 1 / 0 | 0 / 0 / 1 |" in page
    content["tests"][-1]["by seed"] = [[1, 15]]
    page = scoreboard.page([content])
    assert "| tiny | ours | 4 | ↑\u00a015:1 | 8:8 | ↓\u00a01:15 (1 of 2 seeds) |" in page
    assert "| ours | 1 / 0 / 0 | 0 / 1 / 0 |  |" in page


def test_a_file_of_ones_own_is_summed_up_beside_its_parts(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (beside(tmp_path) / "scoreboard.md").unlink()
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    page = (beside(tmp_path) / "scoreboard.md").read_text(encoding="utf-8")
    assert f"palimpsest reproduce {shlex.quote(str(tmp_path / 'tiny.toml'))} --column" in page
    assert "Every experiment of the paper" not in page
    assert not (tmp_path / "docs").exists()


@pytest.fixture
def documented(tiny, tmp_path, monkeypatch):
    """A folder in which the tiny experiment is one of Palimpsest's, and its parts are in the documents."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    names = (*experiment.names(), str(tmp_path / "tiny.toml"))
    monkeypatch.setattr(experiment, "names", lambda: names)
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "docs").rglob("*.*")}


def test_the_documents_keep_what_is_no_longer_elsewhere(documented):
    before = contents(documented)
    assert len(before) == 5
    shutil.rmtree(documented / "runs")
    assert main([*arguments(documented), "--missing"]) == 0
    assert not (documented / "runs").exists()
    assert main([*arguments(documented), "--summarise"]) == 0
    assert contents(documented) == before


def test_parts_are_added_to_the_documents(documented):
    document = documented / "docs" / "results" / "tiny.json"
    old = take_out(document, variant="random", seed=1)
    shutil.rmtree(documented / "runs")
    assert main([*arguments(documented), "--missing"]) == 0
    assert sorted(path.name for path in beside(documented).glob("*-seed*")) == [
        f"{column}-random-k4-seed1.json" for column in ("ours", "published")
    ]
    assert "2 of 28 parts have been run" in (beside(documented) / "scoreboard.md").read_text(encoding="utf-8")
    assert main([*arguments(documented), "--summarise"]) == 0
    new = json.loads(document.read_bytes())
    assert [drop_times(row) for row in new["rows"]] == [drop_times(row) for row in old["rows"]]
    assert new["tests"] == old["tests"]


def take_out(document, **wanted):
    """Parts of a document, which is returned as it was."""
    content = json.loads(document.read_bytes())
    left = [part for part in content["parts"] if not wanted.items() <= part.items()]
    assert 0 < len(left) < len(content["parts"])
    document.write_text(json.dumps(content | {"parts": left}))
    return content


def drop_times(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def test_what_the_documents_hold_is_run_nevertheless_unless_only_the_missing_are_asked_for(documented, capsys):
    shutil.rmtree(documented / "runs")
    assert main([*arguments(documented), "--budget", "0"]) == 0
    assert "tiny: 0 of 28 parts are there" in capsys.readouterr().out
    assert main([*arguments(documented), "--missing", "--summarise"]) == 2


def test_only_full_runs_of_reported_seeds_are_documented(documented, capsys):
    before = contents(documented)
    for option in ("--tuning", "--small"):
        assert main([*arguments(documented), option, "--summarise"]) == 2
        assert "has no part of tiny as it is asked for now" in capsys.readouterr().err
    assert contents(documented) == before


def test_parts_that_are_no_longer_asked_for_stay_in_the_documents(documented, capsys):
    file = documented / "tiny.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("steps = 24", "steps = 25"))
    before = contents(documented)
    assert main([*arguments(documented), "--summarise"]) == 2
    assert "28 of the parts in" in capsys.readouterr().err
    assert contents(documented) == before


def test_parts_that_came_out_otherwise_stay_in_the_documents(documented, capsys):
    path = beside(documented) / "ours-random-k4-seed0.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(result | {"ssim": [0.0, *result["ssim"][1:]]}))
    before = contents(documented)
    assert main([*arguments(documented), "--summarise"]) == 2
    assert "tiny.json, as ours-random-k4-seed0, are no longer asked for, or came out" in capsys.readouterr().err
    assert contents(documented) == before


def test_what_cannot_be_compared_with_the_documents_is_not_run(documented, capsys):
    document = documented / "docs" / "results" / "tiny.json"
    take_out(document, variant="random", seed=1)
    weights = json.loads(document.read_bytes())["networks"][1]["weights"]
    document.write_text(document.read_text(encoding="utf-8").replace(weights, "trained elsewhere"))
    shutil.rmtree(documented / "runs")
    assert main([*arguments(documented), "--missing"]) == 2
    assert "training of seed 1 does not end here with the weights" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["picture", "trajectory"])
def test_a_figure_of_which_not_everything_is_there_stays_as_it_was(documented, lacking):
    part = beside(documented) / "published-splitting-k4-seed0.json"
    if lacking == "picture":
        (beside(documented) / "pictures" / part.name).with_suffix(".safetensors").unlink()
    else:
        result = json.loads(part.read_text(encoding="utf-8"))
        del result["trajectories"]
        part.write_text(json.dumps(result))
    before = contents(documented)
    assert main([*arguments(documented), "--summarise"]) == 0
    assert contents(documented) == before


def test_a_figure_of_parts_that_are_no_longer_there_goes(documented):
    document = documented / "docs" / "results" / "tiny.json"
    file = documented / "tiny.toml"
    before, ours = file.read_text(encoding="utf-8").split("[columns.ours]")
    file.write_text(f"{before}[columns.ours]{ours.replace('steps = 24', 'steps = 25')}")
    take_out(document, column="ours")
    shutil.rmtree(documented / "runs")
    assert main([*arguments(documented), "--summarise"]) == 0
    assert list(json.loads(document.read_bytes())["figures"]) == ["tiny-curves.png"]


def test_a_picture_of_other_settings_is_not_shown(documented):
    runner, part = runner_in(documented), Part("ours", "none", 4, 0)
    assert runner.pictures(part) is not None
    file = documented / "tiny.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("steps = 24", "steps = 25"))
    assert runner_in(documented).pictures(part) is None


def test_how_a_file_writes_what_it_asks_for_does_not_matter(documented):
    file = documented / "tiny.toml"
    other = file.read_text(encoding="utf-8").replace("alike = 0.95, dead = 0.01", "dead = 0.01, alike = 0.95")
    file.write_text(other.replace("[columns.ours]", "[columns.ours]\nsharpness = [10, 200]"))  # as the base has it
    assert len(runner_in(documented).results()) == 28


def test_held_out_images_have_scores_of_their_own(tiny):
    for result in runner_in(tiny).results().values():
        for metric in ("ssim", "l2"):
            assert len(result[f"held-out {metric}"]) == 8
            assert result[f"held-out {metric}"] != result[metric]


def test_results_of_another_version_are_refused(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (beside(tmp_path) / "results" / "other.json").write_text('{"scoreboard": 1}')
    with pytest.raises(InvalidInputError, match=r"other\.json is of another version"):
        scoreboard.write(beside(tmp_path))


@pytest.mark.parametrize("lacking", ["rows", "parts", "figures"])
def test_results_that_lack_something_are_refused(tiny, tmp_path, lacking):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text(encoding="utf-8"))
    (tmp_path / "lacking.json").write_text(json.dumps({k: v for k, v in content.items() if k != lacking}))
    with pytest.raises(InvalidInputError, match=lacking):
        summary.read(tmp_path / "lacking.json")


@pytest.mark.parametrize("change", [{"ssim": [5.0] * 8}, {"weights": "others"}, {"seed": []}])
def test_known_parts_with_wrong_content_are_refused(tiny, tmp_path, change):
    content = json.loads((beside(tiny) / "results" / "tiny.json").read_text(encoding="utf-8"))
    content["parts"][0] |= change
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match=r"wrong\.json"):
        summary.known(tmp_path / "wrong.json")


def test_the_scoreboard_is_what_the_results_say(tmp_path):
    shutil.copytree(DOCS / "results", tmp_path / "results")
    assert scoreboard.write(tmp_path).read_text(encoding="utf-8") == (DOCS / "scoreboard.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", experiment.names())
def test_the_results_are_what_their_parts_say(name, tmp_path):
    path = DOCS / "results" / f"{name}.json"
    runner = Runner(experiment.load(name), tmp_path, known=summary.known(path))
    content = summary.read(path)
    results = runner.results()
    assert results.keys() == runner.known.keys()
    again = json.loads(json.dumps(summary.summed_up(runner, results)))
    assert again == {key: value for key, value in content.items() if key not in ("figures", "parts")}


def test_what_was_not_run_is_said(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for name in ("ours-random-k4-seed0", "ours-random-k4-seed1", "published-none-k4-seed1"):
        (tmp_path / "runs" / "tiny" / f"{name}.json").unlink()
    assert main([*arguments(tmp_path), "--summarise"]) == 0
    page = (beside(tmp_path) / "scoreboard.md").read_text(encoding="utf-8")
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
    [
        *(("mean SSIM", 0.65), ("above 0.4", 20), ("above 0.9", 10), ("mean L2", 16.5), ("best-25 L2", 13.0)),
        *(("held-out above 0.4", 1), ("held-out mean L2", 36.5), ("held-out best-25 L2", 33.0)),
    ],
)
def test_measures_are_of_all_images(measure, value):
    result = {"ssim": [0.3] * 10 + [0.7] * 10 + [0.95] * 10, "l2": list(range(32, 0, -1))}
    result |= {"held-out ssim": [0.3] * 9 + [0.5], "held-out l2": list(range(52, 20, -1))}
    assert summary.MEASURES[measure](result) == pytest.approx(value)


def test_what_was_not_measured_of_all_parts_has_no_mean():
    kept, not_kept = {"held-out l2": [1.0, 3.0]}, {}
    assert summary._mean("held-out mean L2", [kept, kept]) == 2.0
    assert summary._mean("held-out mean L2", [kept, not_kept]) is None


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


def test_one_seed_is_said_to_be_one():
    test = {"better": 9, "worse": 1, "p": 0.001, "by seed": [[9, 1]], "verdict": "even"}
    assert next(findings._told(test | {"of all": [9, 1]})).endswith("p = 0.001, but on one seed alone")


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
    assert ("p = 0.001, but not on every seed" in sentence) == (verdict == "even")
    assert f"splitting {words}** (2 of 3 seeds):" in sentence
    assert "21 of 25" in sentence
    assert sentence.endswith("random (2 of 3 seeds).")
