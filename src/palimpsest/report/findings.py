"""The table that compares the reconstructions in numbers."""

from palimpsest.report.content import Variant
from palimpsest.report.words import duration, number
from palimpsest.scoring import Outcome, Score


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
