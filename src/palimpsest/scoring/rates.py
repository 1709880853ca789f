"""Which given images were trained on, at a known rate of false positives.

Held-out images are known not to be trained on. If a given image was not trained on either, its score ranks anywhere
among theirs, so p = (1 + #{held-out ≥ score}) / (m + 1) is a p-value: P(p ≤ α) ≤ α. With m held-out images no rate
below 1/(m + 1) can be resolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from palimpsest.errors import NonFiniteError
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

    def resolves(self, α: float) -> bool:
        """Whether there are enough held-out images for the rate α of false positives."""
        return self.finest <= _rounded_up(α)

    def at(self, α: float) -> Tensor:
        """(n,) whether each given image is named at the rate α of false positives: p ≤ α."""
        return self.p_values <= _rounded_up(α)

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The ROC: for each rate k/(m + 1) of false positives, the share of given images with p ≤ k/(m + 1)."""
        most = round(1 / self.finest)
        ranks = (self.p_values * most).round().long()
        share = ranks.bincount(minlength=most + 1).cumsum(0)[1:].double() / len(ranks)
        return [(k / most, y) for k, y in enumerate(share.tolist(), 1)]


def _rounded_up(α: float) -> float:
    """α beyond rounding, because 1/(m + 1) and α = 0.01 are rounded in different ways."""
    return α * (1 + 1e-9)


def rates(given: Tensor, held_out: Tensor, *, at: Sequence[float] = RATES) -> Rates:
    """Compare the scores of given images with those of held-out images. Larger scores speak for training images.

    Examples:
        >>> found = rates(torch.tensor([3.0, 0.5]), torch.linspace(0, 1, 99))
        >>> found.p_values.tolist(), found.named
        ([0.01, 0.51], {0.01: 0.5, 0.001: None})
    """
    x, y = given.double().cpu(), held_out.double().cpu().sort().values
    if not bool(x.isfinite().all() and y.isfinite().all()):  # NaN does not have a rank
        raise NonFiniteError("the scores of given or held-out images contain NaN or infinity; leave these images out")
    p = (1 + len(y) - torch.searchsorted(y, x)).double() / (len(y) + 1)
    found = Rates(p, {}, 1 / (len(y) + 1), judge(x, y))
    return replace(found, named={α: float(found.at(α).double().mean()) if found.resolves(α) else None for α in at})
