"""The figures of the report, one function each: from results to a drawing with its alternative text."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from markupsafe import Markup
from torch import Tensor

from palimpsest.report.content import Variant, counted
from palimpsest.report.svg import LEFT, TOP, Panel, limits, logarithmic_limits
from palimpsest.report.words import number
from palimpsest.scoring import ImageScores, Score
from palimpsest.scoring.rates import Rates

BIN = 0.025  # of likeness
PERCENT = 5  # of probability in a bin
STYLES = ("first", "last")  # of two curves: dashed and solid; a single one is solid
DOT = 2.6  # radius of an eigenvalue


def distribution(score: Score) -> Markup:
    """Training images above the line, held-out images below, a brick each; solid if it counts in the verdict."""
    assert score.held_out is not None
    groups = {1: ("Training images", score), -1: ("Held-out images", score.held_out)}
    heaps = {side: _heaps(scores) for side, (_, scores) in groups.items()}
    tallest = max(len(heap) / len(groups[side][1].ssim) for side in groups for heap in heaps[side].values())
    low = min(0, *(BIN * bin_ for side in groups for bin_ in heaps[side]))
    bar = score.verdict.threshold
    panel = Panel(540, 380, x=(low, 1), y=(-1.3, 1.15), left=4)
    panel.x_axis("likeness of the matched candidate", about=10)
    for side, (name, scores) in groups.items():
        height = side / len(scores.ssim) / tallest
        for bin_, heap in heaps[side].items():
            for level, evidence in enumerate(sorted(heap, reverse=True)):
                if side > 0:
                    class_ = "solid" if evidence > bar else "hollow"
                else:  # held-out images that beat their blurred copies set the threshold
                    class_ = "held-out" if evidence > 0 else "held-out blur"
                y = (level * height, (level + 1) * height)
                panel.rectangle((bin_ * BIN, (bin_ + 1) * BIN), y, class_, air=(1.25, 1.25))
        text = f"{name} ({len(scores.ssim)})"
        panel.add("text", text, class_="label", x=0, y=panel.y(1.15) - 12 if side > 0 else panel.y(-1.3) - 8)
    panel.horizontal(0, "axis")
    if bar > 0:
        panel.vertical(bar, "bar")
        _beside(panel, bar, panel.y(1.08), f"threshold: {bar:.2f}")
    means = [
        f"{len(s.ssim)} {name.lower()}, mean likeness {float(s.likeness.mean()):.2f}" for name, s in groups.values()
    ]
    solid = int((score.evidence > bar).sum())
    return panel.svg(
        f"Distribution of the scores of {', and of '.join(means)}. {solid} training images are {counted(score)}."
    )


def _heaps(scores: ImageScores) -> dict[int, list[float]]:
    """The evidence that the verdict judges, by bins of likeness."""
    heaps: dict[int, list[float]] = {}
    for likeness, evidence in zip(scores.likeness.tolist(), scores.evidence.tolist(), strict=True):
        heaps.setdefault(min(math.floor(likeness / BIN), round(1 / BIN) - 1), []).append(evidence)
    return heaps


def _beside(panel: Panel, x: float, y: float, text: str) -> None:
    """A note beside a vertical line, on the side with more room."""
    right = panel.x(x) > 0.7 * panel.width
    place = panel.x(x) + (-5 if right else 5)
    panel.add("text", text, class_="note", x=place, y=y, text_anchor="end" if right else "start")


PROBABILITY, AGREEMENT = (
    "estimated probability of showing a training image, in per cent",
    "agreement of the restarts, in hundredths",
)


def histograms(ours: Tensor, chance: Tensor, likely: int, what: str) -> Markup:
    """Of the network above the line, of its negative control below; the first ``likely`` of the network are solid."""
    bar = float(chance.max()) if len(chance) else 0.0
    unit = " %" if what == PROBABILITY else ""
    groups = {1: ("This network", ours, likely), -1: ("Negative control", chance, 0)}
    panel = Panel(540, 320, x=(0, 100), y=(-1.5, 1.5), left=4)
    panel.x_axis(what, about=10)
    far_right = 100 * bar < 50  # headings stand in the corner that is farther from the vertical line
    for side, (name, probability, first) in groups.items():
        percent = (100 * probability).tolist()
        counts, solid = _by_bins(percent), _by_bins(percent[:first])  # the likeliest come first
        tallest = max(counts.values(), default=1)
        for bin_, count in counts.items():
            x = (bin_ * PERCENT, (bin_ + 1) * PERCENT)
            panel.rectangle(x, (0, side * count / tallest), "hollow" if side > 0 else "held-out", air=(2, 0))
            if solid[bin_]:
                panel.rectangle(x, (0, side * solid[bin_] / tallest), "solid", air=(2, 0))
            end = panel.y(side * count / tallest) + (-5 if side > 0 else 14)
            panel.add("text", f"{count}", class_="note", x=panel.x(sum(x) / 2), y=end, text_anchor="middle")
        place, anchor = (panel.x.end, "end") if far_right else (panel.x.start, "start")
        y = panel.y(1.5) - 12 if side > 0 else panel.y(-1.5) - 6
        panel.add("text", f"{name} ({len(percent)})", class_="label", x=place, y=y, text_anchor=anchor)
    panel.horizontal(0, "axis")
    panel.vertical(100 * bar, "bar")
    _beside(panel, 100 * bar, panel.y(1.5) + 8, f"highest of the control: {100 * bar:.0f}{unit}")
    return panel.svg(
        f"{len(ours)} candidates, {likely} of them solid, and {len(chance)} candidates of the negative control, by"
        f" {what}. The highest of the control is {100 * bar:.0f}{unit}."
    )


def _by_bins(percent: list[float]) -> Counter[int]:
    return Counter(min(max(math.floor(value / PERCENT), 0), 100 // PERCENT - 1) for value in percent)


def roc(rates: Rates, level: float) -> Markup:
    """Given images named against false positives, on logarithmic axes, down to the finest rate."""
    low = 100 * min(rates.finest, level) / 1.2
    shown = [(100 * x, 100 * y) for x, y in rates.curve if 100 * y >= low]
    panel = Panel(540, 380, x=(low, 100), y=(low, 100), logarithmic=True, logarithmic_x=True)
    panel.y_axis("given images named, in per cent")
    panel.x_axis("false positives, in per cent")
    panel.line([(low, low), (100, 100)], "diagonal")
    panel.vertical(100 * level, "bar")
    _beside(panel, 100 * level, panel.y(low) - 6, f"level: {100 * level:.3g} %")
    steps = [place for (x, y), (after, _) in pairwise(shown) for place in ((x, y), (after, y))]
    panel.line([*steps, *shown[-1:]], "curve last")
    named = float(rates.at(level).double().mean())
    return panel.svg(
        f"Receiver operating characteristic. At a rate of {level:.3g}, {named:.3g} of the given images are named."
    )


def scatter(names: list[str], scores: list[Score]) -> Markup:
    """Each training image once: its score in one reconstruction against that in the other."""
    first, last = scores
    pairs = list(zip(first.likeness.tolist(), last.likeness.tolist(), strict=True))
    low = min(0.0, min(map(min, pairs)))
    panel = Panel(400, 380, x=(low, 1), y=(low, 1))
    panel.y_axis(f"likeness {names[1]}")
    panel.x_axis(f"likeness {names[0]}")
    panel.line([(low, low), (1, 1)], "diagonal")
    if (bar := first.verdict.threshold) > 0:
        panel.vertical(bar, "bar")
    if (bar := last.verdict.threshold) > 0:
        panel.horizontal(bar, "bar")
        panel.add("text", "threshold", class_="note", x=LEFT + 4, y=panel.y(bar) - 5)
    for (x, y), recovered in zip(pairs, last.recovered.tolist(), strict=True):
        panel.dot(x, y, "solid" if recovered else "hollow")
    return panel.svg(
        f"Scatter plot of {len(pairs)} training images: likeness {names[0]} across, {names[1]} upwards."
        f" {improved(scores)} of them lie above the diagonal."
    )


def improved(scores: list[Score]) -> int:
    """The number of training images that the second reconstruction shows better than the first."""
    return int((scores[1].likeness > scores[0].likeness).sum())


def loss_curves(variants: list[Variant]) -> Markup:
    """The unexplained share of the target, over time."""
    series = [[r for r in v.records if 0 < r["loss"] < math.inf] for v in variants]
    return _curves(variants, series, "loss", "relative loss", logarithmic_limits, logarithmic=True)


def metric_curves(variants: list[Variant], metric: str, label: str) -> Markup:
    """One figure of merit over time."""

    def from_zero(values: list[float]) -> tuple[float, float]:
        return min([0.0, *values]), max(limits(values)[1], 1e-3)

    series = [[m for m in v.metrics if math.isfinite(m[metric])] for v in variants]
    return _curves(variants, series, metric, label, from_zero, logarithmic=False)


def _curves(
    variants: list[Variant],
    series: list[list[dict[str, Any]]],
    key: str,
    label: str,
    range_of: Callable[[list[float]], tuple[float, float]],
    *,
    logarithmic: bool,
) -> Markup:
    """One curve per variant over its steps, with a line at each round of splitting."""
    last = max([entry["step"] for v in variants for entry in (*v.history, *v.metrics)] + [1])
    y = range_of([entry[key] for entries in series for entry in entries])
    panel = Panel(370, 250, x=(0, last), y=y, logarithmic=logarithmic)
    panel.x_axis("step", about=4)
    splits = [s for v in variants for s in v.splits if s["split"]]
    for split in splits:
        panel.vertical(split["step"], "split")
        if len(splits) <= 4:
            place = panel.x(split["step"])
            panel.add("text", f"+{split['split']}", class_="note", x=place, y=TOP - 4, text_anchor="middle")
    panel.y_axis(label)
    for style, entries in zip(STYLES[-len(series) :], series, strict=True):
        panel.line([(entry["step"], entry[key]) for entry in entries], f"curve {style}")
        for entry in entries[-1:]:
            panel.dot(entry["step"], entry[key], f"end {style}")
    ends = [f"{v.name}: {number(s[-1][key], 2)}" for v, s in zip(variants, series, strict=True) if s]
    return panel.svg(f"{label[0].upper()}{label[1:]} over steps. At the end, {', '.join(ends)}.")


def eigenvalues(rounds: list[dict[str, Any]]) -> Markup | None:
    """−λ_min of every candidate's splitting matrix at each round: the promised gain; solid if the candidate split."""
    unstable = [-v for s in rounds for v in s["eigenvalues"] if v < 0]
    if not unstable:  # a logarithmic scale shows negative eigenvalues only
        return None
    panel = Panel(540, 320, x=(-0.5, len(rounds) - 0.5), y=logarithmic_limits(unstable), logarithmic=True, bottom=56)
    panel.y_axis(Markup("−λ<tspan class=sub dy=3>min</tspan><tspan dy=-3>, relative</tspan>"))
    for i, event in enumerate(rounds):
        _swarm(panel, i, event)
        stable = sum(v >= 0 for v in event["eigenvalues"])
        lines = [f"step {event['step']:,}", f"{event['split']} of {len(event['eigenvalues'])} split"]
        lines += [f"{stable} stable"] if stable else []
        for j, line in enumerate(lines if len(rounds) <= 5 else lines[:1]):
            y = panel.height - panel.bottom + 16 * (j + 1)
            panel.add("text", line, class_="note" if j else "tick", x=panel.x(i), y=y, text_anchor="middle")
    counts = [f"at step {s['step']}, {s['split']} of {len(s['eigenvalues'])} candidates split" for s in rounds]
    return panel.svg(f"Smallest eigenvalues of the splitting matrices in {len(rounds)} rounds: {'; '.join(counts)}.")


def _swarm(panel: Panel, place: int, event: dict[str, Any]) -> None:
    """The eigenvalues of one round, side by side where they would hide each other."""
    width = 0.9 * (panel.x(1) - panel.x(0))
    rows: Counter[int] = Counter()
    for rank, value in enumerate(v for v in sorted(event["eigenvalues"]) if v < 0):
        row = round(panel.y(-value) / (2 * DOT))
        shift = (rows[row] + 1) // 2 * (-1 if rows[row] % 2 else 1) * 2.3 * DOT
        rows[row] += 1
        class_ = "solid" if rank < event["split"] else "hollow"
        panel.dot(place, -value, class_, radius=DOT, shift=max(-width / 2, min(width / 2, shift)))
