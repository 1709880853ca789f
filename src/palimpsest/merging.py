"""Merging, the opposite of splitting: candidates that show one image become one, those that explain nothing go.

Copies of one x represent Σ_i λ_i f(x) = (Σ_i λ_i) f(x): one candidate with the sum of their multipliers stands for all,
and L stays exactly as it is. Nearly equal candidates become their mean, weighted by |λ|, which is right to first order.
With splitting in between, the number of candidates can grow where images are missing and shrink where they are many.

At the end the number of images is read off the sizes ‖λ_i f(x_i)‖: candidates beyond their number fill what the
linearised network leaves unexplained, and each of them explains far less than an image does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.objectives import Objective

EQUAL = 1e-9  # ratios of sizes that differ from 1 by less are rounding


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which candidates are merged and which are dropped.

    Args:
        alike: candidates are copies if 2⟨x_i, x_j⟩ / (‖x_i‖² + ‖x_j‖²), which is 1 only for equal ones, is at least
            this, their labels are equal, and their multipliers agree in sign: two of opposite sign, side by side,
            represent a derivative of f and no copy.
        dead: a candidate is dropped if its ‖λ_i f(x_i)‖ is below this share of the largest one's.
        closing: the share of a run's steps for one more phase at its end, 0 for none. Before the last round of
            splitting the :func:`large` candidates are counted, and no others kept; before the closing phase as many
            are, or as are large by then, if these are more. All stay if the large ones have grown in number as all have
            since the round before: there are too few then, and more rounds of splitting needed. Only doubling
            (``share=1``) tells the two apart well. The closing phase anneals like the second half of any other.
    """

    alike: float = 0.95
    dead: float = 0.01
    closing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alike <= 1 or not 0 <= self.dead < 1 or not 0 <= self.closing < 1:
            raise InvalidInputError(
                "merging needs 0 < alike ≤ 1, 0 ≤ dead < 1 and 0 ≤ closing < 1, "
                f"not {self.alike}, {self.dead} and {self.closing}"
            )
        if self.closing and not self.dead:
            raise InvalidInputError(
                "a closing phase tells large candidates from small ones, not from none; give dead > 0"
            )


@dataclass(frozen=True)
class Merged:
    """The candidates that are left."""

    x: Tensor
    multipliers: Tensor
    labels: Tensor | None
    kept: Tensor
    """(k',) index, among the candidates before, of the one with the largest multiplier in each group of copies."""
    sizes: Tensor
    """(k',) ‖λ_i f(x_i)‖."""

    def __getitem__(self, some: Tensor) -> Merged:
        labels = None if self.labels is None else self.labels[some]
        return Merged(self.x[some], self.multipliers[some], labels, self.kept[some], self.sizes[some])


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
    sizes = contributions(objective, x, multipliers, labels)
    return Merged(x, multipliers, labels, kept, sizes)[sizes >= policy.dead * sizes.max()]


def large(sizes: Tensor) -> Tensor:
    """(k,) which sizes belong to the larger of two classes: candidates that show images, if there are enough.

    Their logarithms are cut where that leaves least variance in both parts, and that is where k_1 k_2 (μ_1 − μ_2)² is
    largest (Otsu 1979). Any sizes can be cut; what speaks for a cut is that it counts as many when candidates are more.

    >>> large(torch.tensor([0.9, 0.02, 1.1, 1.0, 0.03, 0.02])).tolist()
    [True, False, True, True, False, False]
    """
    k, ordered = len(sizes), sizes.double().clamp_min(torch.finfo(torch.float64).tiny).log().sort()
    everything = torch.ones_like(sizes, dtype=torch.bool)
    if ordered.values[-1] - ordered.values[0] < EQUAL:
        return everything
    k_1, sums = torch.arange(1, k).to(ordered.values), ordered.values.cumsum(0)
    μ_1, μ_2 = sums[:-1] / k_1, (sums[-1] - sums[:-1]) / (k - k_1)
    cut = 1 + int((k_1 * (k - k_1) * (μ_1 - μ_2).square()).argmax())
    return everything.index_fill(0, ordered.indices[:cut], False)


def images_by_size(count: Mapping[str, int], before: Mapping[str, Any] | None) -> int | None:
    """How many images there seem to be; None as long as the large candidates grow in number with all.

    Where there are two classes, the larger stays as large as it is when the other grows; where there is one, a cut
    through it counts in proportion to all. The bound is half-way, √(growth of all). What was found the round before
    holds, for then only images were split, and there may be so few small ones that the cut falls among the images.

    >>> images_by_size({"large": 41, "among": 160}, before={"large": 38, "among": 80})
    41
    >>> images_by_size({"large": 80, "among": 160}, before={"large": 38, "among": 80}) is None
    True
    """
    if before is None:
        return None
    if "images" in before:
        return max(count["large"], before["images"])
    growth = math.sqrt(count["among"] / before["among"])
    return count["large"] if count["large"] <= growth * before["large"] else None


def largest(sizes: Tensor, count: int) -> Tensor:
    """Indices of so many of the largest sizes, in their order."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values


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
