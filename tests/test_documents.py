"""What the documents show is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if python_blocks(d)], ids=lambda d: d.name)
def test_the_examples_run_as_written(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(python_blocks(document)), str(document), "exec"), {"__name__": "example"})


def test_a_new_method_takes_at_most_forty_lines():
    method = python_blocks(ROOT / "docs" / "adding-a-method.md")[0]
    assert "Objective" in method
    assert len(method.splitlines()) <= 40


def test_the_readme_shows_lines_of_the_scoreboard():
    scoreboard = (ROOT / "docs" / "scoreboard.md").read_text().splitlines()
    shown = [line for line in (ROOT / "README.md").read_text().splitlines() if "→" in line and line.startswith("|")]
    assert len(shown) > 3
    assert set(shown) <= set(scoreboard)


def test_the_tables_of_the_documents_are_those_of_the_measurements():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], check=True)
