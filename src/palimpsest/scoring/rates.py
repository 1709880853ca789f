"""Which given images were trained on, at a known rate of false positives.

Held-out images are known not to be trained on. If a given image was not trained on either, its score ranks anywhere
among theirs, so p = (1 + #{held-out ≥ score}) / (m + 1) is a p-value: P(p ≤ α) ≤ α. With m held-out images no rate
below 1/(m + 1) can be resolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.scoring.verdict import Verdict, judge

RATES = (0.01, 0.001)


@dataclass(frozen=True)
class Rates:
    """How well scores tell given images from held-out ones."""

    p_values: Tensor
    """(n,) one for each given image."""
    named: dict[float, float | None]
    """The share of the given images with p ≤ α, for each rate α; None if the held-out images cannot resolve it."""
    finest: float
    """1/(m + 1): the lowest rate of false positives that m held-out images resolve."""
    verdict: Verdict
    """Whether the given images as a whole score higher than held-out ones, with the AUC and its interval."""


def rates(given: Tensor, held_out: Tensor, *, at: Sequence[float] = RATES) -> Rates:
    """Compare the scores of given images with those of held-out images. Larger scores speak for training images.

    Examples:
        >>> found = rates(torch.tensor([3.0, 0.5]), torch.linspace(0, 1, 99))
        >>> found.p_values.tolist(), found.named
        ([0.01, 0.51], {0.01: 0.5, 0.001: None})
    """
    x, y = given.double().cpu(), held_out.double().cpu().sort().values
    p = (1 + len(y) - torch.searchsorted(y, x)).double() / (len(y) + 1)
    finest = 1 / (len(y) + 1)
    named = {α: float((p <= α * (1 + 1e-9)).double().mean()) if finest <= α * (1 + 1e-9) else None for α in at}
    return Rates(p, named, finest, judge(x, y))


def curve(given: Tensor, held_out: Tensor) -> list[tuple[float, float]]:
    """The ROC: for each possible number of false positives, their rate and that of true positives."""
    y = held_out.double().cpu().sort(descending=True).values
    above = [float((given.double().cpu() > threshold).double().mean()) for threshold in y]
    return [(i / len(y), share) for i, share in enumerate(above)] + [(1.0, 1.0)]
