"""What the documents show is run as it stands there."""

import math
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from reproduce import experiment, parts, summary

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if python_blocks(d)], ids=lambda d: d.name)
def test_the_examples_run_as_written(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(python_blocks(document)), str(document), "exec"), {"__name__": "example"})


def test_types_are_shipped():
    """Else type checkers ignore the annotations, and the classifier in pyproject.toml is not true."""
    assert (resources.files("palimpsest") / "py.typed").is_file()


def test_a_new_method_takes_at_most_forty_lines():
    method = python_blocks(ROOT / "docs" / "adding-a-method.md")[0]
    assert "Objective" in method
    assert len(method.splitlines()) <= 40


def test_the_readme_shows_lines_of_the_scoreboard():
    tables = (ROOT / "docs" / "experiments" / "overview.md").read_text(encoding="utf-8").splitlines()
    shown = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if "→" in line and line.startswith("|")
    ]
    assert len(shown) > 3
    assert set(shown) <= set(tables)


def test_what_is_said_about_splitting_is_the_scoreboards_tally():
    page = (ROOT / "docs" / "experiments" / "overview.md").read_text(encoding="utf-8")
    head, _, *rows = page[page.index("| better / not significant / worse |") :].split("\n\n")[0].splitlines()
    against = [cell.strip() for cell in head.split("|")[2:-1]]
    tally = {}
    for row in rows:
        column, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        for other, cell in zip(against, cells, strict=True):
            tally[column, other] = [int(count) for count in cell.split(" / ")] if cell else [0, 0, 0]
    said = " ".join((ROOT / "docs" / "splitting.md").read_text(encoding="utf-8").split())
    rows = rows_of("ntk-cifar10")
    improved = [row["% better than unsplit"] for row in rows if row["column"] == "ours" and row["candidates"] >= 100]
    most = math.ceil(max(filter(None, improved)))
    assert f"neither splitting nor any control improves more than {most} of 100 images in the mean" in said
    better, _, worse = ours = tally["ours", "final-k"]
    assert better == 0
    assert f"worse in {worse} of {sum(ours)} comparisons" in said
    random = [sum(counts) for counts in zip(tally["ours", "random"], tally["published", "random"], strict=True)]
    assert random[0] == random[2] == 0
    assert f"In none of {random[1]} comparisons can curvature be told from a random direction" in said
    assert "beats duplication in {} of {}.".format(*of_all(tally["ours", "duplicate"])) in said
    better, _, worse = published = tally["published", "none"]
    assert f"it helps in {better} of {sum(published)} comparisons, hurts in {worse}" in said
    better, _, worse = published = tally["published", "final-k"]
    assert f"more candidates in {better} of {sum(published)}, and worse in {worse}." in said


def rows_of(name):
    known = experiment.load(name)
    return summary.summed_up(known, parts.read(ROOT / "experiments" / "results" / name, known))["rows"]


def of_all(counts):
    return counts[0], sum(counts)


@pytest.mark.parametrize("name", ["kkt-mnist-100", "kkt-mnist-500", "multiclass-mnist-100", "multiclass-mnist-500"])
def test_what_is_said_about_digits_is_what_was_measured(name):
    rows = {(row["column"], row["candidates"]): row for row in rows_of(name) if row["variant"] == "none"}
    for k in {candidates for column, candidates in rows if column == "ours"}:
        trained, held_out = (
            {column: rows[column, k][measure] for column in ("published", "ours")}
            for measure in ("mean L2", "held-out mean L2")
        )
        assert held_out["published"] - held_out["ours"] > 0.5 * (trained["published"] - trained["ours"])
        ahead = held_out["ours"] - trained["ours"] > held_out["published"] - trained["published"]
        assert ahead == ((name, k) != ("kkt-mnist-100", 60))


def test_the_tables_of_the_documents_are_those_of_the_measurements():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], check=True)
