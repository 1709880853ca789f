"""The layout is the architecture: few entries, imports that point one way, one meaning for each name."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import palimpsest

SOURCE = Path(palimpsest.__file__).parent
MATHEMATICS = ("methods", "objectives", "solver", "scoring", "identifiability", "execution", "span")
APPLICATION = {"files", "runs", "report", "auditing", "cli", "bench"}
# States and results are saved through palimpsest.files, which is imported only when that is asked for.
SAVES = {"solver/state.py", "solver/reconstruction.py"}


def modules():
    return [(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text("utf-8"))) for path in SOURCE.rglob("*.py")]


def imported(tree, *, everywhere=True):
    """The parts of Palimpsest that a module imports: anywhere, or when it is loaded."""
    for node in ast.walk(tree) if everywhere else tree.body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "palimpsest":
            names += [f"palimpsest.{alias.name}" for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("palimpsest."))


def test_the_top_level_shows_the_architecture():
    entries = {path.name for path in SOURCE.iterdir() if not path.name.startswith("__")}  # not Python's own
    assert len(entries) <= 18
    assert {"methods", "objectives", "solver", "files", "runs", "cli", "span.py", "py.typed"} <= entries


@pytest.mark.parametrize("part", MATHEMATICS)
def test_the_mathematics_knows_nothing_of_files_and_pages(part):
    for name, tree in modules():
        if name.split("/")[0].removesuffix(".py") == part:
            assert not APPLICATION & set(imported(tree, everywhere=name not in SAVES)), name


def test_reports_know_neither_audits_nor_runs():
    for name, tree in modules():
        if name.startswith("report/"):
            assert not {"auditing", "runs"} & set(imported(tree)), name


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}
