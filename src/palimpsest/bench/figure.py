"""Time and memory of a step against the number of candidates and the width, depth and input size of the network."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

OTHERS = {"published float32": "#c44e52", "floor": "#8c8c8c"}
OURS = "#1f5a94"
ESTIMATE = "estimate"


def draw(results: Mapping[str, Any]) -> bytes:
    """A PNG of the sweep of :func:`palimpsest.bench.compare`, with time above and memory below."""
    sweep = results["sweep"]
    figure = Figure(figsize=(3.2 * len(sweep), 6), layout="constrained")
    panels = figure.subplots(2, len(sweep), sharex="col", sharey="row", squeeze=False)
    for (upper, lower), (respect, points) in zip(panels.T, sweep.items(), strict=True):
        _lines(upper, points, _by_contender(points, "milliseconds"))
        _lines(lower, points, _memory(points))
        lower.set_xlabel(respect)
    panels[0, 0].set_ylabel("milliseconds per step")
    panels[1, 0].set_ylabel("megabytes")
    for first in panels[:, 0]:
        first.legend(frameon=False, fontsize="small")
    base = next(iter(results["steps"]))
    figure.suptitle(f"{base}, and one of its numbers varied; {results['device']}, threads: {results['threads']}")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _memory(points: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The measured peaks, as on CUDA, or the estimate for our step."""
    measured = {name: values for name, values in _by_contender(points, "megabytes").items() if None not in values}
    return measured or {ESTIMATE: [point["estimated megabytes"] for point in points]}


def _by_contender(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Any]]:
    names = [row["name"] for row in points[0]["timings"]]
    return {name: [point["timings"][i][key] for point in points] for i, name in enumerate(names)}


def _lines(axes: Axes, points: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> None:
    values = [point["value"] for point in points]
    for name, curve in curves.items():
        colour, label = (OTHERS[name], name) if name in OTHERS else (OURS, f"ours, {name}")
        axes.loglog(values, curve, "--" if name == ESTIMATE else "-", marker=".", color=colour, label=label)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
