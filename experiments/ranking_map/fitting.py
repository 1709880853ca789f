"""The map from features to probability, and how far estimated and observed shares agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from palimpsest.auditing.agreement import Agreed
from palimpsest.auditing.ranking import Kind, features, probability

FEATURES = ("constant", "agreement", "agreement at a margin", "agreement along a path",
            "agreement above crowding, by pixels", "copies", "crowding", "explained", "explained in span",
            "several outputs, everywhere", "span")  # fmt: skip
RIDGE = 1e-3
BINS, FULL, OFF = 5, 20, 0.1  # a bin counts from 20 candidates on; its shares may differ by ten points
CONFIGURATIONS, CANDIDATES = 3, 50  # that the validation of a kind needs at least


@dataclass(frozen=True)
class Read:
    """The distinct candidates of one reading, and which of them are real."""

    network: Mapping[str, Any]
    kind: Kind
    agreed: Agreed
    real: np.ndarray
    exchanged: int
    """How many would be real if the held-out images had been trained on."""

    @classmethod
    def of(cls, network: Mapping[str, Any], row: Mapping[str, Any]) -> Read:
        agreement, copies = torch.tensor(row["agreement"]), torch.tensor(row["copies"])
        images = torch.zeros(1).expand(len(agreement), *row["shape"])  # the map uses their shape alone
        originals = torch.tensor(row["originals"], dtype=torch.long)
        agreed = Agreed(images, agreement, copies, row["crowding"], row["explained"], originals)
        return cls(network, Kind(**row["kind"]), agreed, np.array(row["real"], dtype=float), row["exchanged"])

    @property
    def configuration(self) -> tuple[tuple[str, str], ...]:
        """The network without its seed and the effort: the same one, read again, is not another."""
        return tuple((name, str(v)) for name, v in self.network.items() if name not in ("seed", "steps", "restarts"))

    @property
    def empty(self) -> bool:
        """Whether the weights hold nothing to read."""
        return bool(self.network["permuted"] or self.network["training"] == "noise")

    @property
    def shown(self) -> np.ndarray:
        """Which candidates an audit shows: not those that are poor copies of one with more agreement."""
        originals = self.agreed.originals.numpy()
        return (originals < 0) | (originals > np.arange(len(originals)))

    def probability(self, b: Mapping[str, float]) -> np.ndarray:
        return probability(self.agreed, self.kind, b).numpy()[self.shown]


def fit_map(every: Sequence[Read], names: Sequence[str]) -> dict[str, float]:
    """Coefficients b of the most likely logistic map; a slight ridge keeps them finite."""
    φ = np.concatenate([_matrix(each, names) for each in every])
    y = np.concatenate([each.real[each.shown] for each in every])

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        z = φ @ b
        value = np.mean(np.logaddexp(0, z) - y * z) + RIDGE * b[1:] @ b[1:]
        return float(value), φ.T @ (1 / (1 + np.exp(-z)) - y) / len(y) + 2 * RIDGE * np.r_[0, b[1:]]

    return dict(zip(names, minimize(loss, np.zeros(len(names)), jac=True).x.round(4).tolist(), strict=True))


def _matrix(each: Read, names: Sequence[str]) -> np.ndarray:
    φ = features(each.agreed, each.kind)
    return torch.stack([φ[name] for name in names], 1).double().numpy()[each.shown]


def log_loss(every: Sequence[Read], b: Mapping[str, float]) -> float:
    p, y = _flat(every, b)
    return float(-np.mean(y * np.log(p.clip(1e-6)) + (1 - y) * np.log((1 - p).clip(1e-6))))


def left_out(every: Sequence[Read], names: Sequence[str]) -> float:
    """The mean log loss of the candidates, each network judged by a map that was fitted on the others."""
    used = [each for each in every if each.shown.any()]
    losses = [log_loss([one], fit_map([each for each in used if each is not one], names)) for one in used]
    return float(np.average(losses, weights=[each.shown.sum() for each in used]))


def _flat(every: Sequence[Read], b: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    p = [each.probability(b) for each in every]
    return np.concatenate(p), np.concatenate([each.real[each.shown] for each in every])


def bins(every: Sequence[Read], b: Mapping[str, float]) -> list[dict[str, Any]]:
    """Number of candidates, estimated and observed share in each fifth of the scale that has any."""
    p, y = _flat(every, b)
    place = np.minimum((BINS * p).astype(int), BINS - 1)
    return [
        {"bin": i, "n": int((place == i).sum()), "estimated": round(float(p[place == i].mean()), 3),
         "observed": round(float(y[place == i].mean()), 3)}
        for i in range(BINS) if (place == i).any()
    ]  # fmt: skip


def calibrated(rows: Sequence[Mapping[str, Any]], configurations: int) -> bool:
    """Whether estimated and observed shares agree in every full bin, and the highest bin is full.

    Claims rest on the highest bin. If nobody saw candidates there, a high probability was never put to the test.
    """
    full = [row for row in rows if row["n"] >= FULL]
    enough = configurations >= CONFIGURATIONS and sum(row["n"] for row in rows) >= CANDIDATES
    highest = any(row["bin"] == BINS - 1 for row in full)
    return enough and highest and all(abs(row["estimated"] - row["observed"]) <= OFF for row in full)
