"""The findings in numbers: those beside the verdict, and the tables."""

from __future__ import annotations

from dataclasses import dataclass

from palimpsest.report.content import Variant
from palimpsest.report.words import duration, number, p_value
from palimpsest.scoring import Outcome, Score, Verdict


@dataclass(frozen=True)
class Figure:
    """One number that matters."""

    value: str
    name: str
    detail: str


def recovered(verdict: Verdict, detail: str) -> Figure:
    """The number of recovered images. Without enough held-out images, a match proves nothing."""
    count = f"{verdict.recovered} of {verdict.total}"
    if verdict.outcome is Outcome.NO_VERDICT:
        return Figure(count, "training images with a good match", "better than a blurred copy, which proves nothing")
    return Figure(count, "training images recovered", detail)


def key_figures(score: Score, held_out: int) -> list[Figure]:
    """The numbers behind the verdict on a reconstruction."""
    verdict, percent = score.verdict, f"{100 * score.verdict.confidence:.3g} %"
    mean = Figure(f"{float(score.ssim.mean()):.2f}", "mean SSIM", "over all training images; 1 means identical")
    if verdict.interval is None or verdict.auc is None or verdict.auc_interval is None or verdict.p_value is None:
        return [recovered(verdict, ""), mean]
    (low, high), (auc_low, auc_high) = verdict.interval, verdict.auc_interval
    beyond_chance = (
        f"{low} to {high} of them beyond chance ({percent} interval)" if high else "none above the threshold"
    )
    auc = f"{auc_low:.2f} to {auc_high:.2f} ({percent} interval); 0.5 is chance"
    threshold = Figure("a blur", "threshold", f"none of {held_out} held-out images beats its blurred copy")
    if verdict.threshold > 0:
        highest = f"highest likeness of {held_out} held-out images, among those that beat their blurred copies"
        threshold = Figure(f"{verdict.threshold:.2f}", "threshold", highest)
    return [
        recovered(verdict, beyond_chance),
        Figure(f"{verdict.auc:.2f}", "AUC, training against held-out", auc),
        Figure(p_value(verdict.p_value), "if nothing had leaked", "probability of a result at least this strong"),
        threshold,
        mean,
    ]


# --- the tables ----------------------------------------------------------------------------------


def comparison(variants: list[Variant]) -> list[tuple[str, list[str]]]:
    """Rows of a name and one value for each variant."""
    scores = [variant.score for variant in variants if variant.score is not None]
    rows = _score_rows(scores) if len(scores) == len(variants) else []
    losses = [number(v.records[-1]["loss"]) if v.records else "–" for v in variants]
    return [
        *rows,
        ("Final loss, relative", losses),
        ("Candidates at the end", [f"{len(v.images):,}" for v in variants]),
        ("Time", [duration(v.seconds) for v in variants]),
    ]


def _score_rows(scores: list[Score]) -> list[tuple[str, list[str]]]:
    verdicts = [score.verdict for score in scores]
    counts = [f"{v.recovered} ({v.interval[0]}–{v.interval[1]})" if v.interval else f"{v.recovered}" for v in verdicts]
    aucs = [
        f"{v.auc:.2f} ({v.auc_interval[0]:.2f}–{v.auc_interval[1]:.2f})" if v.auc_interval else "–" for v in verdicts
    ]
    return [
        ("Mean SSIM", [f"{float(score.ssim.mean()):.3f}" for score in scores]),
        (counted(scores[-1]).capitalize(), counts),
        *([("AUC", aucs)] if set(aucs) != {"–"} else []),
        *((f"SSIM > {t}", [str(int((score.ssim > t).sum())) for score in scores]) for t in (0.6, 0.9)),
        ("Mean L2 distance", [number(float(score.l2.mean())) for score in scores]),
        ("Median PSNR", [f"{number(float(score.psnr.median()))} dB" for score in scores]),
    ]


def counted(score: Score) -> str:
    """The name of the images that the verdict counts."""
    return "better than a blur" if score.verdict.outcome is Outcome.NO_VERDICT else "recovered"
