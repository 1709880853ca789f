"""How likely is a candidate to be a training image, as far as can be told without the training images?

logit p = Σ_j b_j φ_j of a few features φ of how restarts agree on it. The coefficients are fitted on networks whose
training images are known and judged on others (`experiments/calibrate_ranking.py`); they ship as calibration.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from palimpsest.auditing.agreement import Agreed

MOST_COPIES = 3.0  # that tell more than fewer would
MOST_CERTAIN = 0.98  # no map fitted on a few thousand candidates knows more


def features(agreed: Agreed) -> dict[str, Tensor]:
    """φ: what the probability is a function of.

    Aligned faces resemble one another, and restarts then agree on faces that are nobody's; so agreement counts from
    what different images have in common, which is the crowding. And it says the more, the more pixels there are to
    agree on, in three colours or in one.
    """
    alike, pixels = agreed.crowding, math.log10(max(1, agreed.images[:1].numel()))
    agreement = _nines((agreed.agreement - alike) / (1 - alike))
    return {
        "constant": torch.ones(len(agreed)),
        "agreement": agreement,
        "pixels": torch.full((len(agreed),), pixels),
        "colour": torch.full((len(agreed),), float(agreed.images.ndim == 4 and agreed.images.shape[1] > 1)),
        "agreement by pixels": pixels * agreement,
        "copies": agreed.copies.clamp_max(MOST_COPIES),
        "crowding": torch.full((len(agreed),), alike),
        "explained": _nines(torch.full((len(agreed),), agreed.explained)),
    }


def _nines(share: Tensor) -> Tensor:
    """1 for 0.9, 2 for 0.99, 3 at most."""
    return -torch.log10(1.001 - share.clamp(-1, 1))


@dataclass(frozen=True)
class Ranking:
    """Distinct candidates, the most likely first, each with its probability of being a training image."""

    images: Tensor
    probability: Tensor
    agreement: Tensor
    explained: float
    """Share of ‖T‖² that all candidates explain together."""

    def __len__(self) -> int:
        return len(self.images)


def rank(agreed: Agreed, coefficients: Mapping[str, float] | None = None) -> Ranking:
    """Order candidates by their probability, without those that are poor copies of likelier ones."""
    p = probability(agreed, calibration() if coefficients is None else coefficients)
    order = p.argsort(descending=True, stable=True)
    place = order.argsort()
    copy = (agreed.originals >= 0) & (place[agreed.originals] < place)
    order = order[~copy[order]]
    return Ranking(agreed.images[order], p[order], agreed.agreement[order], agreed.explained)


def probability(agreed: Agreed, coefficients: Mapping[str, float]) -> Tensor:
    φ = features(agreed)
    logit = sum((b * φ[name].double() for name, b in coefficients.items()), torch.zeros(len(agreed)).double())
    # Restarts may agree on a blob that says nothing of the weights: no candidate is likelier than what all explain.
    return torch.sigmoid(logit).clamp_max(min(MOST_CERTAIN, max(agreed.explained, 0.0)))


@cache
def calibration() -> Mapping[str, float]:
    """The coefficients b that ship with Palimpsest."""
    return json.loads(resources.files("palimpsest.auditing").joinpath("calibration.json").read_text())["coefficients"]
