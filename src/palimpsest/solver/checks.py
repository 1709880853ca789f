"""Checks of values that were read from a file, which may be damaged or forged. Each check raises a ValueError.

The type hints here say what a history may hold; `palimpsest.files.schema` checks it against them.
"""

import math
from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch
from torch import Tensor

LARGEST = 1e300  # arithmetic with larger numbers overflows


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, greater than ``above``.

    >>> 0 in Range(above=0, most=1), str(Range(above=0, most=1))
    (False, 'above 0 and of at most 1')
    >>> str(Range(least=0, most=1))
    'from 0 to 1'
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and number > self.above

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {self.least:g} to {self.most:g}"
        limits = {"of at least": self.least, "above": self.above, "of at most": self.most}
        return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))


class StepRecord(TypedDict):
    """An entry of the history: a recorded step."""

    step: int
    loss: float
    objective: float
    gradient: float
    rate: float
    sharpness: float | None
    candidates: int


class MergeRecord(TypedDict, total=False):
    """How many candidates were merged or dropped before a split, by how much L changed, and how many show images."""

    merged: int
    merging: float
    among: Annotated[int, Range(least=1)]
    images: Annotated[int, Range(least=1)]


class SplitRecord(MergeRecord):
    """An entry of the history: a round of splitting."""

    step: int
    split: int
    eta: float
    before: float
    after: float
    eigenvalues: list[float]


def require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(what)


def check_candidates(x: Tensor, ids: Tensor) -> None:
    """Finite candidates, each with a number."""
    require(x.is_floating_point() and x.ndim > 1 and x.numel() > 0, "no candidates")
    require(bool(x.isfinite().all()), "candidates that are not finite")
    require(ids.dtype == torch.int64 and ids.shape == x.shape[:1] and bool((ids >= 0).all()), "candidates without ids")


def check_lineage(lineage: Tensor, ids: Tensor) -> None:
    """Every parent is older than its child, so a line of ancestors ends."""
    require(lineage.dtype == torch.int64 and lineage.ndim == 1, "no lineage")
    require(bool(((lineage >= -1) & (lineage < torch.arange(len(lineage)).to(lineage))).all()), "a circular lineage")
    require(bool((ids < len(lineage)).all()), "candidates without a lineage")
