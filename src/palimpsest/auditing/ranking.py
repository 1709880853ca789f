"""The probability that a candidate shows a training image, estimated without the training images.

logit p = Σ_j b_j φ_j, with features φ of the agreement between restarts. `experiments/ranking_map` fits the
coefficients b on networks with known training images, and tries them on others. They ship as calibration.json, with the
kinds of network for which estimated and observed shares agreed there. For all other kinds p only ranks candidates.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor, nn

from palimpsest.auditing.agreement import Agreed
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.subject import Subject

MARGINS = ("kkt", "kkt-signed", "multiclass")  # methods that explain the final weights alone
MOST_COPIES = 3.0  # more copies do not change the probability
MOST_CERTAIN = 0.98  # a map fitted on a few thousand candidates does not support more


@dataclass(frozen=True)
class Kind:
    """What an audit can see of a network, and how it reads it."""

    method: str
    within: str  # "span" or "everywhere"
    network: str  # "dense", "convolutional" or "other"
    outputs: str  # "one" or "several"

    def __str__(self) -> str:
        return f"{self.method}, {self.within}, {self.network}, {self.outputs}"


def kind(subject: Subject, plan: Plan) -> Kind:
    method = "adam" if plan.rule == "adam" else plan.method
    family = "other" if plan.live else _family(subject.model)  # a live layer need not have parameters
    return Kind(method, plan.within, family, "one" if subject.outputs == 1 else "several")


def _family(model: nn.Module) -> str:
    """By the types of the layers that have parameters: dense ones alone, convolutions too, or others."""
    layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
    if all(isinstance(layer, nn.Linear) for layer in layers):
        return "dense"
    return "convolutional" if all(isinstance(layer, nn.Linear | nn.Conv2d) for layer in layers) else "other"


# --- the map -------------------------------------------------------------------------------------


def features(agreed: Agreed, kind: Kind) -> dict[str, Tensor]:
    """φ, the features of each candidate.

    Aligned faces resemble each other, so restarts may agree on a face that does not exist. Agreement therefore also
    counts from the crowding, the likeness of different images, and more if there are more pixels to agree on. The span
    has few dimensions, so restarts agree there more easily. At a margin and along a path, the fitted networks showed
    more agreement on wrong images; several outputs, which give more equations, showed less.
    """
    n, crowding, pixels = len(agreed), agreed.crowding, math.log10(max(1, agreed.images[:1].numel()))
    explained, span = _nines(torch.full((n,), agreed.explained)), float(kind.within == "span")
    agreement, margin, path = _nines(agreed.agreement), float(kind.method in MARGINS), float(kind.method == "path")
    several = float(kind.outputs == "several" and not span)
    above_crowding = _nines((agreed.agreement - crowding) / (1 - crowding))
    return {
        "constant": torch.ones(n),
        "agreement": agreement,
        "agreement at a margin": margin * agreement,
        "agreement along a path": path * agreement,
        "agreement above crowding, by pixels": pixels * above_crowding,
        "copies": agreed.copies.clamp_max(MOST_COPIES),
        "crowding": torch.full((n,), crowding),
        "explained": explained,
        "explained in span": span * explained,
        "several outputs, everywhere": torch.full((n,), several),
        "span": torch.full((n,), span),
    }


def _nines(share: Tensor) -> Tensor:
    """The number of nines: 1 for 0.9, 2 for 0.99, at most 3."""
    return -torch.log10(1.001 - share.clamp(-1, 1))


def probability(agreed: Agreed, kind: Kind, coefficients: Mapping[str, float]) -> Tensor:
    φ = features(agreed, kind)
    logit = sum((b * φ[name].double() for name, b in coefficients.items()), torch.zeros(len(agreed)).double())
    # Restarts may agree on a blob that explains nothing. So no probability exceeds twice the share that all explain.
    return torch.sigmoid(logit).clamp_max(min(MOST_CERTAIN, max(2 * agreed.explained, 0.0)))


@dataclass(frozen=True)
class Calibration:
    """The coefficients b, and the kinds for which the probabilities are frequencies."""

    coefficients: Mapping[str, float]
    kinds: frozenset[Kind]


@cache
def calibration() -> Calibration:
    """The map that ships with Palimpsest."""
    content = json.loads(resources.files("palimpsest.auditing").joinpath("calibration.json").read_text())
    return Calibration(content["coefficients"], frozenset(Kind(**kind) for kind in content["kinds"]))


# --- the ranking ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Distinct candidates, the most likely first."""

    images: Tensor
    probability: Tensor  # that each shows a training image; if not calibrated, a number to rank by
    agreement: Tensor
    explained: float  # share of ‖T‖² that all candidates explain together
    calibrated: bool = False  # whether estimated and observed shares agreed on networks of this kind

    def __len__(self) -> int:
        return len(self.images)


def rank(agreed: Agreed, kind: Kind) -> Ranking:
    """Order candidates by their probability, without poor copies of likelier candidates."""
    p = probability(agreed, kind, calibration().coefficients)
    order = p.argsort(descending=True, stable=True)
    place = order.argsort()
    copy = (agreed.originals >= 0) & (place[agreed.originals] < place)
    order = order[~copy[order]]
    calibrated = kind in calibration().kinds
    return Ranking(agreed.images[order], p[order], agreed.agreement[order], agreed.explained, calibrated)
