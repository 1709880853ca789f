"""How likely is a candidate to be a training image, as far as can be told without the training images?

logit p = Σ_j b_j φ_j of a few features φ of how restarts agree on it. The coefficients are fitted on networks whose
training images are known and checked on others (`experiments/calibrate_ranking.py`); they ship as calibration.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from palimpsest.auditing.agreement import Agreed

MOST_CERTAIN = 0.98  # no map fitted on a few thousand candidates knows more


def features(agreed: Agreed) -> dict[str, Tensor]:
    """φ: what the probability is a function of."""
    return {
        "constant": torch.ones(len(agreed)),
        "agreement": -torch.log10(1.001 - agreed.agreement.clamp(0, 1)),
        "explained": -torch.log10(1.001 - torch.full((len(agreed),), agreed.explained).clamp(0, 1)),
    }


@dataclass(frozen=True)
class Ranking:
    """Distinct candidates from the most to the least likely, each with its probability of being a training image."""

    images: Tensor
    probability: Tensor
    agreement: Tensor
    explained: float
    """Share of ‖T‖² that all candidates explain together."""

    def __len__(self) -> int:
        return len(self.images)


def rank(agreed: Agreed, coefficients: Mapping[str, float] | None = None) -> Ranking:
    """Order candidates by their probability."""
    p = probability(agreed, calibration() if coefficients is None else coefficients)
    order = p.argsort(descending=True, stable=True)
    return Ranking(agreed.images[order], p[order], agreed.agreement[order], agreed.explained)


def probability(agreed: Agreed, coefficients: Mapping[str, float]) -> Tensor:
    φ = features(agreed)
    logit = sum((b * φ[name].double() for name, b in coefficients.items()), torch.zeros(len(agreed)).double())
    return torch.sigmoid(logit).clamp_max(MOST_CERTAIN)


@cache
def calibration() -> Mapping[str, float]:
    """The coefficients b that ship with Palimpsest."""
    return json.loads(resources.files("palimpsest.auditing").joinpath("calibration.json").read_text())["coefficients"]
