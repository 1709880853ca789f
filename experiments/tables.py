"""Tables of results inside pages of the docs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- results -->\n", "<!-- end of results -->\n"
NOT_MEASURED = "Not measured yet.\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(markdown(["network", "images"], [["MLP", 100]]), end="")
    | network | images |
    |---|---|
    | MLP | 100 |
    """
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines) + "\n"


def write(page: str, table: str, name: str = "") -> None:
    """Replace the table between the two marks of a page. A page with several tables has a name in each first mark."""
    path, start = DOCS / page, START.replace("results", f"results: {name}") if name else START
    before, _, rest = path.read_text(encoding="utf-8").partition(start)
    path.write_text(before + start + table + END + rest.partition(END)[2], encoding="utf-8")
