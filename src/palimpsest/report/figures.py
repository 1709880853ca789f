"""The figures of the report, one function each: from results to a drawing with its alternative text."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol

from markupsafe import Markup
from torch import Tensor

from palimpsest.report.content import Variant
from palimpsest.report.findings import counted
from palimpsest.report.svg import LEFT, TOP, Panel, limits, logarithmic_limits
from palimpsest.report.words import number
from palimpsest.scoring import ImageScores, Score

BIN = 0.025  # of SSIM
PERCENT = 5  # of probability in a bin


class Ranked(Protocol):
    """Candidates in the order of their probabilities."""

    @property
    def probability(self) -> Tensor: ...


Curve = list[tuple[float, float]]
STYLES = ("first", "last")  # of the two variants: dashed and solid


def styled(curves: list[Curve]) -> list[tuple[str, Curve]]:
    """Each variant's curve with its class in the style sheet; a single one looks like the last of two."""
    return list(zip(STYLES[-len(curves) :], curves, strict=True))


# --- the evidence --------------------------------------------------------------------------------


def distribution(score: Score) -> Markup:
    """Training images above the line, held-out images below, one brick each; full where it counts in the verdict."""
    assert score.held_out is not None
    groups = {1: ("Training images", score), -1: ("Held-out images", score.held_out)}
    heaps = {side: _heaps(scores) for side, (_, scores) in groups.items()}
    tallest = max(len(heap) / len(groups[side][1].ssim) for side in groups for heap in heaps[side].values())
    low = min(0, *(BIN * bin_ for side in groups for bin_ in heaps[side]))
    bar = score.verdict.threshold
    panel = Panel(540, 380, x=(low, 1), y=(-1.3, 1.15), left=4)
    panel.x_axis("likeness of the matched candidate", about=10)
    for side, (name, scores) in groups.items():
        brick = side / len(scores.ssim) / tallest
        for bin_, heap in heaps[side].items():
            for level, evidence in enumerate(sorted(heap, reverse=True)):
                _brick(panel, bin_, level * brick, brick, _brick_class(side, evidence, bar))
        text = f"{name} ({len(scores.ssim)})"
        panel.add("text", text, class_="label", x=0, y=panel.y(1.15) - 12 if side > 0 else panel.y(-1.3) - 8)
    panel.horizontal(0, "axis")
    if bar > 0:
        panel.vertical(bar, "bar")
        _beside(panel, bar, panel.y(1.08), f"threshold: {bar:.2f}")
    told = (
        f"{len(s.ssim)} {name.lower()}, mean likeness {float(s.likeness.mean()):.2f}" for name, s in groups.values()
    )
    solid = int((score.evidence > bar).sum())
    return panel.svg(
        f"Distribution of the scores of {', and of '.join(told)}. {solid} training images are {counted(score)}."
    )


def _heaps(scores: ImageScores) -> dict[int, list[float]]:
    """What the verdict judges, by bins of likeness."""
    heaps: dict[int, list[float]] = {}
    for likeness, evidence in zip(scores.likeness.tolist(), scores.evidence.tolist(), strict=True):
        heaps.setdefault(min(math.floor(likeness / BIN), round(1 / BIN) - 1), []).append(evidence)
    return heaps


def _brick_class(side: int, evidence: float, bar: float) -> str:
    """Full beyond the bar, or, for held-out images, where they help to set it."""
    if side > 0:
        return "solid" if evidence > bar else "hollow"
    return "held-out" if evidence > 0 else "held-out blur"


def _brick(panel: Panel, bin_: int, base: float, height: float, class_: str) -> None:
    """One image: a rectangle in its bin, with a hairline of air around it."""
    left, right = panel.x(bin_ * BIN) + 1.25, panel.x((bin_ + 1) * BIN) - 1.25
    upper, lower = sorted((panel.y(base), panel.y(base + height)))
    gap = min(1.25, 0.2 * (lower - upper))
    panel.add("rect", class_=class_, x=left, width=right - left, y=upper + gap, height=lower - upper - 2 * gap)


def _beside(panel: Panel, x: float, y: float, text: str) -> None:
    """A note beside a vertical line, on the side where there is room."""
    right = panel.x(x) > 0.7 * panel.width
    place = panel.x(x) + (-5 if right else 5)
    panel.add("text", text, class_="note", x=place, y=y, text_anchor="end" if right else "start")


def probabilities(ranking: Ranked, negative: Ranked, counting: int, bar: float) -> Markup:
    """Histograms of probability: of the network above the line, of its negative control below; full if they count."""
    groups = {1: ("This network", ranking, counting), -1: ("Negative control", negative, 0)}
    panel = Panel(540, 320, x=(0, 100), y=(-1.5, 1.5), left=4)
    panel.x_axis("estimated probability of showing a training image, in per cent", about=10)
    for side, (name, found, full) in groups.items():
        percent = (100 * found.probability).tolist()
        counts, counting_ones = _by_bins(percent), _by_bins(percent[:full])  # candidates are in order
        tallest = max(counts.values(), default=1)
        for bin_, count in counts.items():
            _column(panel, bin_, side * count / tallest, "hollow" if side > 0 else "held-out")
            _column(panel, bin_, side * counting_ones[bin_] / tallest, "solid")
            end = panel.y(side * count / tallest) + (-5 if side > 0 else 14)
            panel.add("text", f"{count}", class_="note", x=panel.x((bin_ + 0.5) * PERCENT), y=end, text_anchor="middle")
        _opposite(panel, 100 * bar, panel.y(1.5) - 12 if side > 0 else panel.y(-1.5) - 6, f"{name} ({len(percent)})")
    panel.horizontal(0, "axis")
    panel.vertical(100 * bar, "bar")
    _beside(panel, 100 * bar, panel.y(1.5) + 8, f"chance: {bar:.0%}")
    return panel.svg(
        f"Probabilities of {len(ranking.probability)} candidates, and of {len(negative.probability)} of the negative"
        f" control, of which the highest is {bar:.0%}. {counting} are likely."
    )


def _by_bins(percent: list[float]) -> Counter[int]:
    return Counter(min(max(math.floor(value / PERCENT), 0), 100 // PERCENT - 1) for value in percent)


def _column(panel: Panel, bin_: int, height: float, class_: str) -> None:
    """One bar of a histogram, from the line up or down, with air beside it."""
    if height:
        left, right = panel.x(bin_ * PERCENT) + 2, panel.x((bin_ + 1) * PERCENT) - 2
        upper, lower = sorted((panel.y(0), panel.y(height)))
        panel.add("rect", class_=class_, x=left, width=right - left, y=upper, height=lower - upper)


def _opposite(panel: Panel, x: float, y: float, text: str) -> None:
    """A heading in the corner that is farther from a vertical line."""
    right = panel.x(x) < panel.width / 2
    place = panel.x.end if right else panel.x.start
    panel.add("text", text, class_="label", x=place, y=y, text_anchor="end" if right else "start")


def scatter(first: Variant, last: Variant) -> Markup:
    """Each training image once: its score in one reconstruction against that in the other."""
    assert first.score is not None
    assert last.score is not None
    pairs = list(zip(first.score.likeness.tolist(), last.score.likeness.tolist(), strict=True))
    low = min(0.0, min(map(min, pairs)))
    panel = Panel(400, 380, x=(low, 1), y=(low, 1))
    panel.y_axis(f"likeness {last.name}")
    panel.x_axis(f"likeness {first.name}")
    panel.line([(low, low), (1, 1)], "diagonal")
    if (bar := first.score.verdict.threshold) > 0:
        panel.vertical(bar, "bar")
    if (bar := last.score.verdict.threshold) > 0:
        panel.horizontal(bar, "bar")
        panel.add("text", "threshold", class_="note", x=LEFT + 4, y=panel.y(bar) - 5)
    for (x, y), recovered in zip(pairs, last.score.recovered.tolist(), strict=True):
        panel.dot(x, y, "solid" if recovered else "hollow")
    return panel.svg(
        f"Scatter plot of {len(pairs)} training images: likeness {first.name} across, {last.name} upwards."
        f" {improved(first, last)} of them lie above the diagonal."
    )


def improved(first: Variant, last: Variant) -> int:
    """How many training images the last reconstruction shows better than the first."""
    assert first.score is not None
    assert last.score is not None
    return int((last.score.likeness > first.score.likeness).sum())


# --- the runs ------------------------------------------------------------------------------------


def loss_curves(variants: list[Variant]) -> Markup:
    """What of the target is left unexplained, over time."""
    curves = [[(r["step"], r["loss"]) for r in v.records if 0 < r["loss"] < math.inf] for v in variants]
    values = [loss for curve in curves for _, loss in curve]
    panel = _over_time(variants, logarithmic_limits(values), logarithmic=True)
    panel.y_axis("relative loss")
    for style, curve in styled(curves):
        panel.line(curve, f"curve {style}")
    ends = (f"{v.name}: {number(v.records[-1]['loss'], 2)}" for v in variants if v.records)
    return panel.svg("Loss over steps. At the end, " + ", ".join(ends) + ".")


def metric_curves(variants: list[Variant], metric: str, label: str) -> Markup:
    """One figure of merit over time."""
    curves = [[(m["step"], m[metric]) for m in v.metrics if math.isfinite(m[metric])] for v in variants]
    values = [value for curve in curves for _, value in curve]
    panel = _over_time(variants, (min([0.0, *values]), max(limits(values)[1], 1e-3)))
    panel.y_axis(label)
    for style, curve in styled(curves):
        panel.line(curve, f"curve {style}")
        for step, value in curve[-1:]:
            panel.dot(step, value, f"end {style}")
    ends = (f"{v.name}: {number(v.metrics[-1][metric], 2)}" for v in variants if v.metrics)
    return panel.svg(f"{label[0].upper()}{label[1:]} over steps. At the end, " + ", ".join(ends) + ".")


def _over_time(variants: list[Variant], y: tuple[float, float], *, logarithmic: bool = False) -> Panel:
    """Axes over steps, with a line where candidates were split."""
    last = max([entry["step"] for v in variants for entry in (*v.history, *v.metrics)] + [1])
    panel = Panel(370, 250, x=(0, last), y=y, logarithmic=logarithmic)
    panel.x_axis("step", about=4)
    splits = [s for v in variants for s in v.splits if s["split"]]
    for split in splits:
        panel.vertical(split["step"], "split")
        if len(splits) <= 4:
            place = panel.x(split["step"])
            panel.add("text", f"+{split['split']}", class_="note", x=place, y=TOP - 4, text_anchor="middle")
    return panel


# --- the splits ----------------------------------------------------------------------------------


def eigenvalues(variant: Variant) -> Markup:
    """−λ_min of every candidate's splitting matrix at each round: what a split promises; those that split are full."""
    rounds = variant.splits
    unstable = [-v for s in rounds for v in s["eigenvalues"] if v < 0]
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
    rounds_told = "; ".join(
        f"at step {s['step']}, {s['split']} of {len(s['eigenvalues'])} candidates split" for s in rounds
    )
    return panel.svg(f"Smallest eigenvalues of the splitting matrices in {len(rounds)} rounds: {rounds_told}.")


def _swarm(panel: Panel, place: int, event: dict[str, Any], *, radius: float = 2.6) -> None:
    """The eigenvalues of one round, side by side where they would hide each other."""
    width = 0.9 * (panel.x(1) - panel.x(0))
    rows: dict[int, int] = {}
    for rank, value in enumerate(sorted(event["eigenvalues"])):
        if value < 0:
            row = round(panel.y(-value) / (2 * radius))
            rows[row] = n = rows.get(row, -1) + 1
            shift = (n + 1) // 2 * (-1 if n % 2 else 1) * 2.3 * radius
            class_ = "solid" if rank < event["split"] else "hollow"
            panel.dot(place, -value, class_, radius=radius, shift=max(-width / 2, min(width / 2, shift)))


def has_negative_eigenvalues(variant: Variant) -> bool:
    """Whether there is anything to draw on a logarithmic scale."""
    return any(value < 0 for event in variant.splits for value in event["eigenvalues"])
