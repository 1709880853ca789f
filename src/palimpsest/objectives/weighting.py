"""Residual weights w_p: how much the equations of each named parameter count.

By generalised least squares, the best weights in Σ_p w_p ‖r_p‖² are w_p = 1 / v_p. Here v_p is the mean square of the
part of T_p that no training image explains. This part differs between methods:

- KKT: the rest of the random initial values. If they are known, v_p is their mean square. If not, `bulk_variance`
  reads it off the singular values of T_p.
- NTK: the error of linearising the network, which `linearisation_error` estimates from how far it moved.

Weights are scaled so that Σ_p w_p ‖T_p‖² = ‖T‖².

`Likelihood` estimates v_p from the residual itself, at every point. It does not need to know why images do not explain
a parameter, nor how well they will.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError

SMALLEST = 1e-6  # of the largest v_p: no equation counts more than a million times another
ROUNDING = 1e-12  # of the mean square of T: residuals below it are rounding
Weights = Mapping[str, float] | Literal["auto", "likelihood"] | None


@dataclass(frozen=True)
class Likelihood:
    """The weighted geometric mean of the parameters' mean squared residuals,

        L = n Π_p v_p^(n_p/n),   v_p = ‖r_p‖² / n_p,   n = Σ_p n_p numbers in all.

    Let the residuals of p be Gaussian with a variance that is not known. The likelihood is highest at the variance v_p,
    and its logarithm is then −½ n log L up to a constant. Moreover ½ ∂L/∂r_p = w_p r_p and L = Σ_p w_p ‖r_p‖² with
    w_p = L / (n v_p): this is the usual loss, with weights that follow the residual.

    A parameter that no candidate explains yet counts little. It counts more as soon as it is explained. L is not convex
    in r, so splitting matrices do not bound its Hessian.
    """

    counts: Mapping[str, int]  # n_p
    rounding: float  # is added to every v_p, so that none is zero

    @classmethod
    def of(cls, target: Mapping[str, Tensor]) -> Likelihood:
        counts = {name: t.numel() for name, t in target.items()}
        energy = sum(float(t.double().square().sum()) for t in target.values())
        return cls(counts, ROUNDING * energy / sum(counts.values()))

    def variances(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """v_p from ‖r_p‖²."""
        return {name: square / self.counts[name] + self.rounding for name, square in squares.items()}

    def value(self, squares: Mapping[str, Tensor]) -> Tensor:
        """L."""
        n = sum(self.counts.values())
        logs = [self.counts[name] / n * v.log() for name, v in self.variances(squares).items()]
        return n * torch.stack(logs).sum().exp()

    def weights(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w_p = L / (n v_p)."""
        mean = self.value(squares) / sum(self.counts.values())
        return {name: mean / v for name, v in self.variances(squares).items()}


def resolve(
    weights: Weights, energy: Mapping[str, float], unexplained: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """All weights by name: as given (1 if not named), or 1 / v_p from what the method leaves unexplained of ‖T_p‖²."""
    if weights == "auto":
        v = unexplained()
        floor = SMALLEST * max(v.values()) or 1.0  # a bias that starts at zero is not exact
        raw = {name: 1.0 / max(v[name], floor) for name in energy}
        scale = sum(energy.values()) / (sum(raw[name] * energy[name] for name in energy) or 1.0)
        return {name: scale * w for name, w in raw.items()}
    if isinstance(weights, str):
        raise InvalidInputError(f"weights is {weights!r}; give 'auto', 'likelihood' or numbers by name")
    given = dict(weights or {})
    if unknown := sorted(given.keys() - energy.keys()):
        raise InvalidInputError(f"weights name {unknown[0]!r}; choose among {', '.join(energy)}")
    if bad := [name for name, w in given.items() if not 0 <= float(w) < float("inf")]:
        raise InvalidInputError(
            f"the weight of {bad[0]!r} is {given[bad[0]]}; give a finite number that is not negative"
        )
    return {name: float(given.get(name, 1.0)) for name in energy}


def mean_square(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p = mean of θ_p²."""
    return {name: float(θ.double().square().mean()) for name, θ in parameters.items()}


def remnants(θ: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None) -> dict[str, float]:
    """The mean square of the initial values if they are known, else of the bulk of θ."""
    return bulk_variance(θ) if initial is None else mean_square({name: initial[name] for name in θ})


def bulk_variance(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p from the median singular value of θ_p, if the images' share has low rank.

    The singular values of an (m, n) matrix of independent entries of variance v follow the Marchenko–Pastur law. A
    matrix of rank below min(m, n)/2 barely moves their median, so v = median² / (max(m, n) · μ), where μ is the law's
    median. A vector does not have a spectrum; v is its mean square.

    >>> noise = torch.randn(60, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> image = torch.ones(60, 1, dtype=torch.float64) @ torch.ones(1, 90, dtype=torch.float64)
    >>> round(bulk_variance({"W": 0.1 * noise + image})["W"], 2)
    0.01
    """

    def variance(θ: Tensor) -> float:
        matrix = θ.double().flatten(1) if θ.ndim > 1 else θ.double().view(1, -1)
        short, long = sorted(matrix.shape)
        if short == 1:
            return float(matrix.square().mean())
        gram = matrix @ matrix.T if len(matrix) == short else matrix.T @ matrix  # its eigenvalues are the squares
        return float(torch.linalg.eigvalsh(gram).median().clamp_min(0)) / (
            long * _marchenko_pastur_median(short / long)
        )

    return {name: variance(θ) for name, θ in parameters.items()}


def linearisation_error(change: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p = mean(Δ_p²) · Σ_q ‖Δ_q‖² / ‖θ_{0,q}‖² over the other layers q, in which f_p is linear."""

    def layer(name: str) -> str:
        return name.rpartition(".")[0] or name

    moved: dict[str, float] = {}
    for name, Δ in change.items():
        if initial[name].any():  # the movement of a bias that starts at zero cannot be compared with its size
            share = Δ.double().square().sum() / initial[name].double().square().sum()
            moved[layer(name)] = moved.get(layer(name), 0.0) + float(share)
    others = {name: sum(share for q, share in moved.items() if q != layer(name)) for name in change}
    own = mean_square(change)
    return {name: own[name] * others[name] for name in change} if any(others.values()) else own


def _marchenko_pastur_median(ratio: float) -> float:
    """Median of the limiting law of squared singular values / long side, for short side / long side = ratio."""
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    t = (np.arange(20_000) + 0.5) * np.pi / 20_000
    s = (high + low) / 2 - (high - low) / 2 * np.cos(t)  # turns √((high − s)(s − low)) ds into sin² t dt
    mass = np.cumsum(np.sin(t) ** 2 / s)
    return float(s[np.searchsorted(mass, mass[-1] / 2)])
