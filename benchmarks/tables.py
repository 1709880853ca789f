"""Rewrites the tables of docs/performance.md, each between its markers, from the measurements in docs/results.

python benchmarks/tables.py            after a new measurement
python benchmarks/tables.py --check    fails where a table is not that of the measurements
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"
TABLE = re.compile(r"(<!-- table: ([a-z0-9 -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Results = Mapping[str, Any]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_shape(results: Results, cell: Callable[[Results], str]) -> str:
    """Contenders downwards, shapes across."""
    shapes = results["steps"]
    names = [row["name"] for row in next(iter(shapes.values()))]
    cells = ([cell(rows[i]) for rows in shapes.values()] for i in range(len(names)))
    return markdown(["", *shapes], ([name, *row] for name, row in zip(names, cells, strict=True)))


def times(results: Results) -> str:
    return by_shape(results, lambda row: f"{row['milliseconds']:.3f} ({row['of the floor']:.2f})")


def speed_ups(results: Results) -> str:
    return by_shape(
        results,
        lambda row: " / ".join(f"{row[f'faster than published {dtype}']:.2f}" for dtype in ("float64", "float32")),
    )


def device(results: Results) -> str:
    return f"{results['device']}, threads: {results['threads']}, torch {results['versions']['torch']}."


def profile(results: Results) -> str:
    kinds = list(next(iter(results["profile"].values())))
    rows = []
    for shape, parts in results["profile"].items():
        total = sum(part["us"] for part in parts.values())
        cells = (f"{p['us']:.1f} ({p['us'] / total:.0%}; {p['kernels']:.0f})" for p in parts.values())
        rows.append([shape, *cells, f"{total:.1f}"])
    return markdown(["", *kinds, "together"], rows)


def scaling(results: Results) -> str:
    head = ["candidates", "ms per step", "µs per candidate", "peak GB", "in chunks of"]
    return markdown(
        head,
        (
            [
                f"{int(k):,}",
                f"{row['ms per step']:.3f}",
                f"{row['us per candidate']:.3f}",
                f"{row['peak GB']:.2f}",
                f"{row['chunk']:,}" if row["chunk"] else "–",
            ]
            for k, row in results["scaling"].items()
        ),
    )


def seconds(part: str) -> Callable[[Results], str]:
    return lambda results: markdown(["", "seconds"], ([what, f"{s:.3f}"] for what, s in results[part].items()))


def training(results: Results) -> str:
    return markdown(
        ["data, mode, products", "µs per step", "normalised margin", "KKT residual"],
        (
            [name, f"{row['us per step']:.1f}", f"{row['margin']:.4f}", f"{row['residual']:.3f}"]
            for name, row in results["training"].items()
        ),
    )


def reconstruction(results: Results) -> str:
    names = {
        "tf32": "TF32, kernels compiled before",
        "tf32, first": "TF32, first run on a machine",
        "float32": "float32",
        "float64": "float64",
    }
    rows = ((name, results["reconstruction"][key]) for key, name in names.items())
    return markdown(
        ["numbers", "seconds", "mean SSIM", "images above 0.4 / 0.6 / 0.9"],
        ([n, f"{r['seconds']:.2f}", f"{r['mean SSIM']:.3f}", " / ".join(map(str, r["above"]))] for n, r in rows),
    )


TABLES: dict[str, dict[str, Callable[[Results], str]]] = {
    "h200": {
        "times": times,
        "speed-ups": speed_ups,
        "profile": profile,
        "scaling": scaling,
        "lanczos": seconds("lanczos"),
        "scoring": seconds("scoring"),
        "training": training,
        "reconstruction": reconstruction,
    },
    "cpu": {"device": device, "times": times, "speed-ups": speed_ups},
}


def rewritten(page: str) -> str:
    """The page with every table made anew."""
    results = {
        machine: json.loads((DOCS / "results" / f"performance-{machine}.json").read_text(encoding="utf-8"))
        for machine in TABLES
    }

    def table(match: re.Match[str]) -> str:
        machine, _, name = match[2].partition(" ")
        return f"{match[1]}{TABLES[machine][name](results[machine])}\n{match[3]}"

    return TABLE.sub(table, page)


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return int(rewritten(page) != page)
    PAGE.write_text(rewritten(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
