"""What a report is made of: plain values, gathered by whoever asks for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from palimpsest.scoring import Score, strongest


@dataclass(frozen=True)
class Snapshot:
    """The candidates at one moment of a run.

    Args:
        step: when.
        ids: ``(k,)``, their numbers.
        images: ``(k, C, H, W)``, as one would look at them: the mean added, in [0, 1] or a little outside.
    """

    step: int
    ids: Tensor
    images: Tensor


@dataclass(frozen=True)
class Variant:
    """One reconstruction.

    Args:
        name: what tells it from the other one, for example "with splitting".
        images: ``(k, C, H, W)``, the final candidates as one would look at them.
        ids: ``(k,)``, their numbers.
        lineage: for every number ever given, that of the candidate it split from, or −1.
        history: what the solver recorded: steps, and splits.
        score: against the training images; None if they are unknown.
        snapshots: the candidates over time, in order.
        metrics: records of ``step``, ``ssim`` (mean over the training images) and ``recovered``.
        seconds: what it took.
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
        """The rounds of splitting, also those in which nothing split."""
        return [entry for entry in self.history if entry.get("eigenvalues")]

    def ancestor(self, number: int, among: Tensor) -> int | None:
        """Where in ``among`` a candidate, or else its youngest ancestor found there, stands; None if neither does.

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
    """Everything that the report says.

    Args:
        title: of the page.
        variants: one reconstruction, or two to compare; the verdict is that of the stronger one.
        truth: ``(n, C, H, W)``, the training images in [0, 1]; None if they are unknown.
        held_out_count: how many held-out images calibrate the verdict.
        configuration: what was asked for; may be nested, and may contain anything a user typed.
        versions: of the software.
        seeds: of everything random.
        training: facts about the audited network.
        seconds: what each stage took.
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
        scored = [variant for variant in self.variants if variant.score is not None]
        if not scored:
            return self.variants[-1]
        return scored[strongest([variant.score.verdict for variant in scored if variant.score is not None])]
