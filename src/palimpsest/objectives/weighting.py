"""Residual weights w_p: how much each named parameter's equations are worth.

Minimising Σ_p w_p ‖r_p‖² is best, in the sense of generalised least squares, when w_p = 1 / v_p with v_p the mean
square of that part of T_p which no training image explains. The methods differ only in what that part is:

- KKT: the random initial values that training left in place. With the initial weights at hand v_p is their mean
  square; without them it is read off the bulk of the singular values of T_p (`bulk_variance`).
- NTK: the error of linearising the network, which `linearisation_error` estimates from how far it moved.

Weights are scaled so that Σ_p w_p ‖T_p‖² = ‖T‖²: a loss keeps its size, only the balance changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError

LEAST = 1e-6  # of the largest v_p: no equation counts more than a million times another
Weights = Mapping[str, float] | Literal["auto"] | None


def resolve(
    weights: Weights, target: Mapping[str, Tensor], unexplained: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """Weights by name, all of them: as given (1 where silent), or 1 / v_p from what the method leaves unexplained."""
    if weights == "auto":
        v = unexplained()
        floor = LEAST * max(v.values()) or 1.0  # a bias that starts at zero is not therefore beyond all doubt
        raw = {name: 1.0 / max(v[name], floor) for name in target}
        energy = {name: float(t.double().square().sum()) for name, t in target.items()}
        scale = sum(energy.values()) / (sum(raw[name] * energy[name] for name in target) or 1.0)
        return {name: scale * w for name, w in raw.items()}
    if isinstance(weights, str):
        raise InvalidInputError(f"weights is {weights!r}; give 'auto' or a number for each parameter name")
    given = dict(weights or {})
    if unknown := sorted(given.keys() - target.keys()):
        raise InvalidInputError(f"weights name {unknown[0]!r}, which is none of {', '.join(target)}")
    if bad := [name for name, w in given.items() if not 0 <= float(w) < float("inf")]:
        raise InvalidInputError(f"the weight of {bad[0]!r} is {given[bad[0]]}; weights must be finite and not negative")
    return {name: float(given.get(name, 1.0)) for name in target}


def mean_square(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p = mean of θ_p², the initial values' own size."""
    return {name: float(θ.double().square().mean()) for name, θ in parameters.items()}


def remnants(θ: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None) -> dict[str, float]:
    """What training left of the initial values: their mean square if they are known, else the bulk of θ."""
    return bulk_variance(θ) if initial is None else mean_square({name: initial[name] for name in θ})


def bulk_variance(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p from the median singular value of θ_p, taking the images' share to be of low rank.

    The singular values of an (m, n) matrix of independent entries of variance v follow the Marchenko–Pastur law;
    adding a matrix of rank below min(m, n)/2 barely moves their median, so v = median² / (max(m, n) · μ), where μ
    is the law's median. A vector has no spectrum; its mean square is taken.

    >>> noise = torch.randn(60, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> image = torch.ones(60, 1, dtype=torch.float64) @ torch.ones(1, 90, dtype=torch.float64)
    >>> round(bulk_variance({"W": 0.1 * noise + image})["W"], 2)
    0.01
    """

    def variance(θ: Tensor) -> float:
        matrix = θ.double().flatten(1) if θ.ndim > 1 else θ.double().unsqueeze(0)
        short, long = sorted(matrix.shape)
        if short == 1:
            return float(matrix.square().mean())
        return float(torch.linalg.svdvals(matrix).median().square()) / (long * _marchenko_pastur_median(short / long))

    return {name: variance(θ) for name, θ in parameters.items()}


def linearisation_error(change: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, float]:
    """v_p = mean(Δ_p²) · Σ_q ‖Δ_q‖² / ‖θ_{0,q}‖² over the other layers q, in which f_p is linear."""

    def layer(name: str) -> str:
        return name.rpartition(".")[0] or name

    moved: dict[str, float] = {}
    for name, Δ in change.items():
        if initial[name].any():  # a bias that starts at zero has no size to compare its movement with
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
