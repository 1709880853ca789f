"""The content of a report, as plain values."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from palimpsest.scoring import Score, strongest


@dataclass(frozen=True)
class Snapshot:
    """The candidates at one moment of a run.

    Args:
        step: the step.
        ids: ``(k,)``, their numbers.
        images: ``(k, C, H, W)``, with the mean added, about in [0, 1].
    """

    step: int
    ids: Tensor
    images: Tensor


@dataclass(frozen=True)
class Variant:
    """One reconstruction.

    Args:
        name: its difference from the other variant, for example "with splitting".
        images: ``(k, C, H, W)``, the final candidates, with the mean added.
        ids: ``(k,)``, their numbers.
        lineage: the number of the parent of every candidate that ever existed, or −1.
        history: the records of the solver: steps and splits.
        score: the score against the training images. None if they are unknown.
        snapshots: the candidates over time, in order.
        metrics: records of ``step``, ``ssim`` (mean over the training images) and ``recovered``.
        seconds: the time it took.
    """

    name: str
    images: Tensor
    ids: Tensor
    lineage: Tensor
    history: list[dict[str, Any]]
    score: Score | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The recorded steps."""
        return [entry for entry in self.history if "loss" in entry]

    @cached_property
    def splits(self) -> list[dict[str, Any]]:
        """The rounds of splitting, including those in which nothing split."""
        return [entry for entry in self.history if entry.get("eigenvalues")]

    def ancestor(self, number: int, among: Tensor) -> int | None:
        """The place in ``among`` of a candidate or of its youngest ancestor there; None if there is neither.

        >>> import torch
        >>> lineage = torch.tensor([-1, -1, 1, 1])  # candidate 1 split into 2 and 3
        >>> variant = Variant("", torch.zeros(3, 1, 2, 2), torch.tensor([0, 2, 3]), lineage, [])
        >>> variant.ancestor(3, among=torch.tensor([0, 1]))
        1
        """
        places = {int(n): i for i, n in enumerate(among)}
        while number >= 0 and number not in places:
            number = int(self.lineage[number])
        return places.get(number)


@dataclass(frozen=True)
class Content:
    """Everything that the report shows.

    Args:
        title: the title of the page.
        variants: one reconstruction, or two to compare. The stronger one gives the verdict.
        truth: ``(n, C, H, W)``, the training images in [0, 1]. None if they are unknown.
        held_out_count: the number of held-out images that calibrate the verdict.
        configuration: the options. They may be nested, and may contain anything that a user typed.
        versions: the versions of the software.
        seeds: the seeds of all random numbers.
        training: facts about the audited network.
        seconds: the time of each stage.
    """

    title: str
    variants: list[Variant]
    truth: Tensor | None = None
    held_out_count: int = 0
    configuration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def judged(self) -> Variant:
        """The reconstruction that gives the verdict: the strongest, or the last if none was scored."""
        scored = [(variant, variant.score.verdict) for variant in self.variants if variant.score is not None]
        return scored[strongest([verdict for _, verdict in scored])][0] if scored else self.variants[-1]
