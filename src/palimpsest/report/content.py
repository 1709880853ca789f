"""The content of a report: its results as plain values, and the table that compares them in numbers."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from palimpsest.report.words import duration, number
from palimpsest.scoring import Outcome, Score, strongest


@dataclass(frozen=True)
class Snapshot:
    """The candidates at one moment of a run."""

    step: int
    ids: Tensor  # (k,), their numbers
    images: Tensor  # (k, C, H, W), with the mean added, about in [0, 1]


@dataclass(frozen=True)
class Variant:
    """One reconstruction."""

    name: str  # its difference from the other variant, for example "with splitting"
    images: Tensor  # (k, C, H, W), the final candidates, with the mean added
    ids: Tensor  # (k,), their numbers
    lineage: Tensor  # the number of the parent of every candidate that ever existed, or −1
    history: list[dict[str, Any]]  # the records of the solver: steps and splits
    score: Score | None = None  # the score against the training images; None if they are unknown
    snapshots: list[Snapshot] = field(default_factory=list)  # the candidates over time, in order
    metrics: list[dict[str, Any]] = field(default_factory=list)  # records of step, mean ssim and recovered
    seconds: float = 0.0  # the time it took

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The recorded steps."""
        return [entry for entry in self.history if "loss" in entry]

    @cached_property
    def splits(self) -> list[dict[str, Any]]:
        """The rounds of splitting, including those in which nothing split."""
        return [entry for entry in self.history if entry.get("eigenvalues")]

    def ancestor(self, number: int, among: Tensor) -> int | None:
        """The place in ``among`` of a candidate or of its youngest ancestor there; None if there is neither."""
        places = {int(n): i for i, n in enumerate(among)}
        while number >= 0 and number not in places:
            number = int(self.lineage[number])
        return places.get(number)


@dataclass(frozen=True)
class Content:
    """Everything that the report shows."""

    title: str
    variants: list[Variant]  # one reconstruction, or two to compare; the stronger one gives the verdict
    truth: Tensor | None = None  # (n, C, H, W), the training images in [0, 1]; None if they are unknown
    held_out_count: int = 0  # the number of held-out images that calibrate the verdict
    configuration: dict[str, Any] = field(default_factory=dict)  # the options, nested, with anything a user typed
    versions: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)  # facts about the audited network
    seconds: dict[str, float] = field(default_factory=dict)  # the time of each stage

    @property
    def judged(self) -> Variant:
        """The reconstruction that gives the verdict: the strongest, or the last if none was scored."""
        scored = [(variant, variant.score.verdict) for variant in self.variants if variant.score is not None]
        return scored[strongest([verdict for _, verdict in scored])][0] if scored else self.variants[-1]


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
