"""The pages in docs/ say what the results in the repository say."""

from pathlib import Path

import pytest
from reproduce import command, experiment, pages, parts, summary

DOCS = Path(__file__).parents[2] / "docs"


def text_of(path):
    return (DOCS / path).read_text(encoding="utf-8")


def table(path):
    """The rows of the tables of a page."""
    return [line for line in text_of(path).splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("name", experiment.names())
def test_the_page_of_an_experiment_is_what_its_parts_say(name):
    known = experiment.load(name)
    results = parts.read(command.RESULTS / name, known)
    assert {parts.path(command.RESULTS / name, part) for part in results} == set((command.RESULTS / name).iterdir())
    assert all({"commit", "command"} <= result.keys() for result in results.values())
    assert pages.page(known, results, command.DOCS) == text_of(f"experiments/{name}.md")
    assert f"experiments/{name}.md" in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_overview_is_what_all_parts_say():
    assert pages.overview(command.repository_results()) == text_of("experiments/overview.md")


def test_the_conclusions_are_short_and_their_tables_are_those_of_the_overview():
    assert len(text_of("scoreboard.md").splitlines()) <= 80
    assert len(table("scoreboard.md")) > 20
    assert set(table("scoreboard.md")) <= set(table("experiments/overview.md"))


def test_the_conclusions_hold():
    tests = []
    for known, results in command.repository_results().items():
        content = summary.summed_up(known, results)
        plain = {(r["column"], r["candidates"]): r for r in content["rows"] if r["variant"] == "none"}
        best = {name: plain[name, max(column.candidates)] for name, column in known.columns.items()}
        if known.metric == "ssim":
            assert best["ours"]["mean SSIM"] > best["published"]["mean SSIM"]
        if "path" in best:
            sign, measure = (1, "mean SSIM") if known.metric == "ssim" else (-1, "mean L2")
            assert sign * best["path"][measure] > sign * best["ours"][measure]
        tests += [test for test in content["tests"] if test["variant"] == "splitting"]
    assert all(test["verdict"] == "even" for test in tests if test["against"] == "random")
    assert not any(
        test["verdict"] == "better" for test in tests if (test["column"], test["against"]) == ("ours", "final-k")
    )
    goals = [line for name in experiment.names() for line in table(f"experiments/{name}.md") if "**not" in line]
    assert [line.split(" | ")[1:3] for line in goals] == [["splitting", "100"], ["splitting", "200"]]
