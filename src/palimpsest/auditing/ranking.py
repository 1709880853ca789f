"""The probability that a candidate is a training image, estimated without the training images.

logit p = Σ_j b_j φ_j, with features φ of the agreement between restarts. `experiments/calibrate_ranking.py` fits the
coefficients b on networks with known training images, and tests them on others. They ship as calibration.json.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from palimpsest.auditing.agreement import Agreed

MOST_COPIES = 3.0  # more copies do not change the probability
MOST_CERTAIN = 0.98  # a map fitted on a few thousand candidates does not support more


def features(agreed: Agreed) -> dict[str, Tensor]:
    """φ, the features of each candidate.

    Aligned faces resemble each other, so restarts may agree on a face that does not exist. Agreement therefore counts
    from the crowding, the likeness of different images. It counts more if there are more pixels to agree on.
    """
    crowding, pixels = agreed.crowding, math.log10(max(1, agreed.images[:1].numel()))
    agreement = _nines((agreed.agreement - crowding) / (1 - crowding))
    return {
        "constant": torch.ones(len(agreed)),
        "agreement": agreement,
        "pixels": torch.full((len(agreed),), pixels),
        "colour": torch.full((len(agreed),), float(agreed.images.ndim == 4 and agreed.images.shape[1] > 1)),
        "agreement by pixels": pixels * agreement,
        "copies": agreed.copies.clamp_max(MOST_COPIES),
        "crowding": torch.full((len(agreed),), crowding),
        "explained": _nines(torch.full((len(agreed),), agreed.explained)),
    }


def _nines(share: Tensor) -> Tensor:
    """The number of nines: 1 for 0.9, 2 for 0.99, at most 3."""
    return -torch.log10(1.001 - share.clamp(-1, 1))


@dataclass(frozen=True)
class Ranking:
    """Distinct candidates, the most likely first, each with its probability of being a training image."""

    images: Tensor
    probability: Tensor
    agreement: Tensor
    explained: float  # share of ‖T‖² that all candidates explain together

    def __len__(self) -> int:
        return len(self.images)


def rank(agreed: Agreed, coefficients: Mapping[str, float] | None = None) -> Ranking:
    """Order candidates by their probability, without poor copies of likelier candidates."""
    p = probability(agreed, calibration() if coefficients is None else coefficients)
    order = p.argsort(descending=True, stable=True)
    place = order.argsort()
    copy = (agreed.originals >= 0) & (place[agreed.originals] < place)
    order = order[~copy[order]]
    return Ranking(agreed.images[order], p[order], agreed.agreement[order], agreed.explained)


def probability(agreed: Agreed, coefficients: Mapping[str, float]) -> Tensor:
    φ = features(agreed)
    logit = sum((b * φ[name].double() for name, b in coefficients.items()), torch.zeros(len(agreed)).double())
    # Restarts may agree on a blob that explains nothing. So no probability exceeds the share that all explain.
    return torch.sigmoid(logit).clamp_max(min(MOST_CERTAIN, max(agreed.explained, 0.0)))


@cache
def calibration() -> Mapping[str, float]:
    """The coefficients b that ship with Palimpsest."""
    return json.loads(resources.files("palimpsest.auditing").joinpath("calibration.json").read_text())["coefficients"]
