"""The parts are compared, summed up and shown as they are."""

import re
import shutil
from types import SimpleNamespace

import pytest
from reproduce import experiment, figures, pages, parts, summary
from reproduce.command import main
from reproduce.parts import Part
from tiny_experiment import arguments, beside, loaded, results_in


@pytest.fixture(scope="module")
def content(tiny):
    return summary.summed_up(loaded(tiny), results_in(tiny))


def row_of(content, column, variant):
    return next(row for row in content["rows"] if (row["column"], row["variant"]) == (column, variant))


def cells(page, *first):
    """The cells of the table rows that begin with the given cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [line for line in lines if line[: len(first)] == list(first)]


def test_rows_are_means_over_seeds(tiny, content):
    results, row = results_in(tiny), row_of(content, "ours", "splitting")
    scores = [results[Part("ours", "splitting", 4, seed)]["ssim"] for seed in (0, 1)]
    assert row["mean SSIM"] == pytest.approx(sum(map(sum, scores)) / 16, rel=1e-4)
    assert row["seeds"] == [0, 1]
    assert len(content["rows"]) == 14
    assert all((row[summary.IMPROVED] is None) == (row["variant"] == "none") for row in content["rows"])


def test_splitting_is_compared_with_every_other_variant(content):
    tests = {t["against"]: t for t in content["tests"] if (t["column"], t["variant"]) == ("ours", "splitting")}
    assert list(tests) == [name for name in experiment.VARIANTS if name != "splitting"]
    improved = row_of(content, "ours", "splitting")[summary.IMPROVED]
    assert improved == pytest.approx(100 * tests["none"]["of all"][0] / 16)


def test_goals_are_measured(content):
    mean, improved = (goal["measured"] for goal in content["goals"])
    assert mean == row_of(content, "ours", "none")["mean SSIM"]
    assert improved == row_of(content, "ours", "splitting")[summary.IMPROVED]


def test_the_page_shows_tables_and_small_figures(tiny, content):
    page = (beside(tiny) / "tiny.md").read_text(encoding="utf-8")
    assert [len(cells(page, "ours", variant, "4")) for variant in ("splitting", "merging", "final-k")] == [1 + 1, 1, 1]
    assert cells(page, "ours", "none", "4", "mean SSIM at least 2")[0][-1] == "**not reached**"
    assert len(cells(page, "ours", "4")) == sum(test["column"] == "ours" for test in content["tests"])
    shown = re.findall(r"]\((.*)\)$", page, re.MULTILINE)
    assert shown == [f"tiny-{kind}.png" for kind in ("images", "curves", "trajectories")]
    assert all(0 < (beside(tiny) / name).stat().st_size < 250_000 for name in shown)
    assert "not been run" not in page


def test_a_page_is_built_without_running(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for part in (Part("ours", "random", 4, 0), Part("ours", "random", 4, 1), Part("published", "none", 4, 1)):
        parts.path(beside(tmp_path), part).unlink()
    assert main([*arguments(tmp_path), "--pages"]) == 0
    page = (beside(tmp_path) / "tiny.md").read_text(encoding="utf-8")
    assert "have not been run: published, none: 1; ours, random: 2." in page
    assert len(results_in(tmp_path)) == 25


def test_a_figure_without_its_data_keeps_its_file(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in beside(tmp_path).glob("*.png")}
    shutil.rmtree(beside(tmp_path) / "pictures")
    assert main([*arguments(tmp_path), "--pages"]) == 0
    assert {path.name: path.read_bytes() for path in beside(tmp_path).glob("*.png")} == before


def test_the_overview_shows_all_columns_side_by_side(tiny, content):
    [shown] = cells(pages.overview({loaded(tiny): results_in(tiny)}), "tiny", "8", "mean SSIM")
    means = {(row["column"], row["variant"]): f"{row['mean SSIM']:.3f}" for row in content["rows"]}
    assert shown[3] == f"{means['published', 'none']} → {means['published', 'splitting']}"
    assert shown[4] == " → ".join(means["ours", variant] for variant in ("none", "splitting", "merging"))


def test_the_overview_compares_splitting_with_everything(tiny, monkeypatch):
    fixed = {"none": (15, 1, "better"), "random": (8, 8, "even"), "duplicate": (1, 15, "worse")}
    tests = [
        {"column": "ours", "candidates": 4, "variant": "splitting", "against": other, "better": b, "worse": w}
        | {"verdict": verdict, "by seed": [[b, w]] * (1 if other == "duplicate" else 2)}
        for other, (b, w, verdict) in fixed.items()
    ]
    content = summary.summed_up(loaded(tiny), {}) | {"tests": tests}
    monkeypatch.setattr(summary, "summed_up", lambda *_: content)
    page = pages.overview({loaded(tiny): {}})
    assert cells(page, "splitting", "column", "k") == [["splitting", "column", "k", "none", "random", "duplicate"]]
    assert cells(page, "tiny", "ours", "4")[0][3:] == ["↑\u00a015:1", "8:8", "↓\u00a01:15 (1 of 2 seeds)"]
    assert cells(page, "ours") == [["ours", "1 / 0 / 0", "0 / 1 / 0", ""]]


def test_images_without_splitting_are_shown_across_and_with_it_up(tiny):
    results, drawn = results_in(tiny), []
    panel = SimpleNamespace(plot=lambda *points, **_: drawn.append(points[:2]))
    figures._scatter(panel, loaded(tiny), results, Part("ours", "none", 4, 0), "red")
    [(across, up)] = drawn
    for values, variant in ((across, "none"), (up, "splitting")):
        assert list(values) == [s for seed in (0, 1) for s in results[Part("ours", variant, 4, seed)]["ssim"]]


def test_the_sign_test_counts_and_ignores_ties():
    assert summary.sign_test([1.0] * 9 + [-1.0] + [0.0] * 5) == {"better": 9, "worse": 1, "p": pytest.approx(22 / 1024)}
    assert summary.sign_test([0.0])["p"] == 1.0


def results_of(values, *, metric="ssim", held_out=0.0, weights="same", splits=2):
    """One result for each (variant, seed), with the given scores."""
    rest = {"held-out ssim": [held_out], "training": {"weights": weights}, "splits": [{"split": splits}]}
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
    row = [Part("ours", "splitting", 4, seed) for seed in (0, 1)]
    assert summary._tests(one, "ssim")
    assert not summary._tests(one | other, "ssim")
    assert summary._improved(one, "ssim", row) == 100.0
    assert summary._improved(one | other, "ssim", row) is None
    assert summary._improved(one | results_of({("splitting", 1): [0.5]}), "ssim", row) is None


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
def test_a_difference_is_significant_if_every_seed_agrees(by_seed, verdict):
    pairs = {
        seed: [summary.Pair(0.0, gain, True) for gain in [1.0] * b + [-1.0] * w] for seed, (b, w) in enumerate(by_seed)
    }
    assert summary._compared(pairs)["verdict"] == verdict
