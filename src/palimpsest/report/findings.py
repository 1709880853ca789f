"""The findings in words and in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palimpsest.report.content import Content, Variant
from palimpsest.report.words import duration, number, p_value
from palimpsest.scoring import Outcome, Score, Verdict


@dataclass(frozen=True)
class Figure:
    """One number that matters."""

    value: str
    name: str
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """The verdict for someone who reads nothing else, what follows from it, and what does not."""

    kind: str
    sentence: str
    figures: list[Figure]
    means: list[str]
    does_not_mean: list[str]


def finding(content: Content) -> Finding:
    """The verdict on the strongest reconstruction."""
    score = content.judged.score
    if score is None:
        return _no_verdict(len(content.judged.images))
    means, does_not_mean = means_of(score.verdict, content.held_out_count)
    if len(content.variants) > 1:
        means.append(
            f"The verdict is that of the stronger reconstruction, {content.judged.name}. Its p-value and interval are"
            f" corrected for looking at {len(content.variants)}."
        )
    kind = score.verdict.outcome.value.replace(" ", "-")
    figures = _figures(score, content.held_out_count)
    return Finding(kind, score.verdict.sentence, figures, means, does_not_mean)


def means_of(verdict: Verdict, held_out: int) -> tuple[list[str], list[str]]:
    """Conclusions that a verdict on scores supports, and conclusions that it does not."""
    told = {
        Outcome.LEAKAGE: _leakage,
        Outcome.NO_EVIDENCE: _no_evidence,
        Outcome.NO_VERDICT: _too_few_held_out,
    }[verdict.outcome]
    return told(verdict, held_out)


def _figures(score: Score, held_out: int) -> list[Figure]:
    verdict, percent = score.verdict, f"{100 * score.verdict.confidence:.3g} %"
    mean = Figure(f"{float(score.ssim.mean()):.2f}", "mean SSIM", "over all training images; 1 means identical")
    count = f"{verdict.recovered} of {verdict.total}"
    if verdict.interval is None or verdict.auc is None or verdict.auc_interval is None or verdict.p_value is None:
        return [
            Figure(count, "training images with a good match", "better than a blurred copy, which proves nothing"),
            mean,
        ]
    low, high = verdict.interval
    auc_low, auc_high = verdict.auc_interval
    return [
        Figure(
            count,
            "training images recovered",
            f"{low} to {high} of them beyond chance ({percent} interval)" if high else "none passes the threshold",
        ),
        Figure(
            f"{verdict.auc:.2f}",
            "AUC, training against held-out",
            f"{auc_low:.2f} to {auc_high:.2f} ({percent} interval); 0.5 is chance",
        ),
        Figure(p_value(verdict.p_value), "if nothing had leaked", "probability of a result at least this strong"),
        _bar(verdict, held_out),
        mean,
    ]


def _bar(verdict: Verdict, held_out: int) -> Figure:
    if verdict.threshold > 0:
        return Figure(
            f"{verdict.threshold:.2f}",
            "threshold",
            f"highest likeness of {held_out} held-out images, among those that beat their blurred copies",
        )
    return Figure("a blur", "threshold", f"none of {held_out} held-out images beats its blurred copy")


def _leakage(verdict: Verdict, held_out: int) -> tuple[list[str], list[str]]:
    percent = f"{100 * (1 - verdict.confidence):.2g} %"
    single = verdict.interval is not None and verdict.interval[0] > 0
    found = (
        f"{verdict.recovered} of {verdict.total} training images match a candidate better than their blurred copy does,"
        f" and better than each of {held_out} held-out images that beats its blurred copy."
        if single
        else "The candidates are closer to the training images as a whole than to held-out images of the same kind. No"
        " single image can be named with confidence."
    )
    means = [
        found,
        f"If the candidates did not depend on the training images, at most {percent} of audits would claim leakage.",
    ]
    return means, [
        "A stronger method, or this one with other settings, may recover more images.",
        "An outsider may not be able to do the same, because the audit may use more than the final weights, such as the"
        " initial weights. The settings below list its inputs.",
    ]


def _no_evidence(verdict: Verdict, held_out: int) -> tuple[list[str], list[str]]:
    return [
        f"The candidates do not match the training images better than {held_out} held-out images of the same kind.",
    ], [
        "The training images are not proven safe. A stronger attack, more steps or more candidates may succeed. No"
        " positive control was run here; `palimpsest audit` runs one.",
        "The network may still have memorised images in ways that a pixel-by-pixel comparison does not notice.",
    ]


def _too_few_held_out(verdict: Verdict, held_out: int) -> tuple[list[str], list[str]]:
    return [
        "Images of one kind resemble each other, so a candidate may match a training image by chance. Held-out images"
        f" measure how often that happens; this comparison has {held_out or 'none'}.",
        "For a verdict, repeat the comparison with a few dozen held-out images of the same kind.",
    ], ["The scores below prove neither that training images leaked nor that they did not."]


def _no_verdict(candidates: int) -> Finding:
    return Finding(
        kind="no-verdict",
        sentence=f"No verdict: {candidates} candidates were reconstructed, but no training images were given for"
        " comparison.",
        figures=[],
        means=["Compare the candidates below with the training images to see whether they appear."],
        does_not_mean=["This proves neither that training images leaked nor that they did not."],
    )


# --- the table -----------------------------------------------------------------------------------


def comparison(variants: list[Variant]) -> list[tuple[str, list[str]]]:
    """Rows of a name and one value for each variant."""
    rows: list[tuple[str, list[str]]] = []
    if all(variant.score is not None for variant in variants):
        scores = [variant.score for variant in variants if variant.score is not None]
        rows.append(("Mean SSIM", [f"{float(score.ssim.mean()):.3f}" for score in scores]))
        rows.append((counted(scores[-1]).capitalize(), [_recovered(score) for score in scores]))
        if any(score.verdict.auc is not None for score in scores):
            rows.append(("AUC", [_auc(score) for score in scores]))
        rows += [(name, [measure(score) for score in scores]) for name, measure in MEASURES.items()]
    rows.append(("Final loss, relative", [number(v.records[-1]["loss"]) if v.records else "–" for v in variants]))
    rows.append(("Candidates at the end", [f"{len(v.images):,}" for v in variants]))
    rows.append(("Time", [duration(v.seconds) for v in variants]))
    return rows


def rounds(variant: Variant) -> list[list[str]]:
    """One row for each round of splitting: step, candidates before, how many split, η, and what it did to the loss."""
    return [
        [
            f"{event['step']:,}",
            f"{len(event['eigenvalues']):,}",
            f"{event['split']:,}",
            number(event["eta"]) if event["split"] else "–",
            number(event["before"], 2),
            number(event["after"], 2),
        ]
        for event in variant.splits
    ]


def counted(score: Score) -> str:
    """The name of the images that the verdict counts."""
    return "better than a blur" if score.verdict.outcome is Outcome.NO_VERDICT else "recovered"


def _recovered(score: Score) -> str:
    interval = score.verdict.interval
    return str(score.verdict.recovered) + (f" ({interval[0]}–{interval[1]})" if interval else "")


def _auc(score: Score) -> str:
    verdict = score.verdict
    if verdict.auc is None or verdict.auc_interval is None:
        return "–"
    return f"{verdict.auc:.2f} ({verdict.auc_interval[0]:.2f}–{verdict.auc_interval[1]:.2f})"


MEASURES: dict[str, Callable[[Score], str]] = {
    "SSIM > 0.6": lambda score: str(int((score.ssim > 0.6).sum())),
    "SSIM > 0.9": lambda score: str(int((score.ssim > 0.9).sum())),
    "Mean L2 distance": lambda score: number(float(score.l2.mean())),
    "Median PSNR": lambda score: f"{number(float(score.psnr.median()))} dB",
}
