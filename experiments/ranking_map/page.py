"""The table and the reliability diagram of docs/ranking.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tables

from ranking_map.fitting import BINS, FULL, OFF

Rows = Sequence[Mapping[str, Any]]
COLUMNS = (
    "method",
    "searched",
    "layers",
    "outputs",
    "networks in fit and validation (configurations)",
    "candidates",
    "probabilities",
)


def table(kinds: Rows) -> str:
    """A row for each kind: its networks, its bins from estimated to observed, and whether it is calibrated."""
    scale = [f"{i / BINS:.1f} to {(i + 1) / BINS:.1f}" for i in range(BINS)]
    rows = []
    for row in kinds:
        kind, bins = row["kind"], {each["bin"]: each for each in row["bins"]}
        cells = [_cell(bins.get(i)) for i in range(BINS)]
        said = "calibrated" if row["calibrated"] else "ranks only"
        networks = f"{row['in fit']} + {row['networks']} ({row['configurations']})"
        rows.append([*kind.values(), networks, row["candidates"], said, *cells])
    return tables.markdown([*COLUMNS, *scale], rows)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["n"] < FULL:
        return "–" if row is None else f"({row['n']})"
    return f"{row['estimated']:.2f} → {row['observed']:.2f} ({row['n']})"


def figure(kinds: Rows, path: Path) -> None:
    """The observed share over the estimated one, a panel for each kind. Hollow bins have too few candidates."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    across = 4
    down = -(-len(kinds) // across)
    size = (2.4 * across, 2.6 * down)
    sheet, axes = plt.subplots(down, across, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, kinds, strict=False):
        kind, colour = row["kind"], "#1b6ca8" if row["calibrated"] else "#a84a1b"
        axis.fill_between([0, 1], [-OFF, 1 - OFF], [OFF, 1 + OFF], color="0.9", linewidth=0)
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        for each in row["bins"]:
            face = colour if each["n"] >= FULL else "none"
            axis.plot(each["estimated"], each["observed"], "o", color=colour, markerfacecolor=face, markersize=5)
        said = "calibrated" if row["calibrated"] else "ranks only"
        title = f"{kind['method']}, {kind['within']}\n{kind['network']}, {kind['outputs']}: {said}"
        axis.set_title(title, fontsize=7)
        axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axis.tick_params(labelsize=6)
    sheet.supxlabel("estimated share", fontsize=8)
    sheet.supylabel("observed share", fontsize=8)
    sheet.tight_layout()
    sheet.savefig(path, dpi=110)
    plt.close(sheet)
