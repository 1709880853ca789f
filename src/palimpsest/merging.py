"""Merging, the opposite of splitting: candidates that show one image become one, those that explain nothing go.

Copies of one x represent Σ_i λ_i f(x) = (Σ_i λ_i) f(x): one candidate with the sum of their multipliers stands for all,
and L stays exactly as it is. Nearly equal candidates become their mean, weighted by |λ|, which is right to first order.
With splitting in between, the number of candidates can grow where images are missing and shrink where they are many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.objectives import Objective


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which candidates are merged and which are dropped.

    Args:
        alike: candidates are copies if 2⟨x_i, x_j⟩ / (‖x_i‖² + ‖x_j‖²), which is 1 only for equal ones, is at least
            this, their labels are equal, and their multipliers agree in sign: two of opposite sign, side by side,
            represent a derivative of f and no copy.
        dead: a candidate is dropped if its ‖λ_i f(x_i)‖ is below this share of the largest one's.
    """

    alike: float = 0.95
    dead: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.alike <= 1 or not 0 <= self.dead < 1:
            raise InvalidInputError(f"merging needs 0 < alike ≤ 1 and 0 ≤ dead < 1, not {self.alike} and {self.dead}")


@dataclass(frozen=True)
class Merged:
    """The candidates that are left."""

    x: Tensor
    multipliers: Tensor
    labels: Tensor | None
    kept: Tensor
    """(k',) index, among the candidates before, of the one with the largest multiplier in each group of copies."""


def merge(
    objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None, policy: Merging | None = None
) -> Merged:
    """Make one candidate of each group of copies, then drop the dead; the order of the candidates does not matter."""
    policy = policy or Merging()
    λ = multipliers.reshape(len(x), -1)
    group = _groups(_copies(x, multipliers, labels, policy.alike))
    member = torch.nn.functional.one_hot(group).to(x).T  # (groups, k)
    weight = member * λ.norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    mean = (weight / weight.sum(1, keepdim=True)) @ x.flatten(1)
    kept = weight.argmax(1)
    x = torch.where((member.sum(1) > 1)[:, None], mean, x[kept].flatten(1)).reshape(-1, *x.shape[1:])
    multipliers = (member @ λ).reshape(-1, *multipliers.shape[1:])
    labels = None if labels is None else labels[kept]
    size = contributions(objective, x, multipliers, labels)
    alive = size >= policy.dead * size.max()
    return Merged(x[alive], multipliers[alive], None if labels is None else labels[alive], kept[alive])


def contributions(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
    """(k,) ‖λ_i f(x_i)‖, what each candidate explains by itself."""
    alone = [(x[i], multipliers[i], None if labels is None else labels[i]) for i in torch.arange(len(x))[:, None]]
    return torch.stack([objective.represented_norm_squared(*one) for one in alone]).sqrt()


def _copies(x: Tensor, multipliers: Tensor, labels: Tensor | None, alike: float) -> Tensor:
    """(k, k) which candidates are copies of which."""
    flat, λ = x.flatten(1), multipliers.reshape(len(x), -1)
    square = flat.square().sum(1)
    # By distances, for in single precision equal candidates need not have a similarity of exactly 1 otherwise.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
    same = (λ @ λ.T >= 0) & (distance <= (1 - alike) * (square[:, None] + square))
    return same if labels is None else same & (labels[:, None] == labels)


def _groups(copies: Tensor) -> Tensor:
    """(k,) number of the group of each candidate; copies of copies are copies."""
    return torch.from_numpy(connected_components(copies.cpu().numpy())[1]).long().to(copies.device)
