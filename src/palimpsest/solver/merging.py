"""Merging, the opposite of splitting: duplicates become one candidate, and candidates that explain nothing are dropped.

Duplicates of one x represent Σ_i λ_i f(x) = (Σ_i λ_i) f(x). One candidate with the sum of their multipliers replaces
them, and L does not change. Nearly equal candidates become their mean, weighted by |λ|, which is right to first order.

The sizes ‖λ_i f(x_i)‖ tell the number of images. Surplus candidates fit the error of the linearised network, and each
explains far less than an image does. They stay until the end, because removing them earlier degrades the images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.objectives import Objective

FEWEST, SMALLEST = 5, 0.1  # candidates of a kind, in number and as a share; fewer are outliers
FAR = 2.5  # ratio of the geometric means of two kinds, beyond which the smaller kind does not show images


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which candidates are merged and which are dropped.

    Args:
        alike: candidates are duplicates if 2⟨x_i, x_j⟩ / (‖x_i‖² + ‖x_j‖²) is at least this. Their labels must be equal
            and their multipliers must agree in sign. Two of opposite sign represent a derivative of f.
        dead: a candidate is dropped if its ‖λ_i f(x_i)‖ is below this share of the largest one.
        counting: before each round of splitting, count the candidates that show images. Once the count is possible
            there are enough candidates, and splitting ends. At the end duplicates are merged once more, and candidates
            that show no image are dropped. Loss and certificate then describe the remaining candidates.

    Examples:
        >>> Merging(alike=0.99)
        Merging(alike=0.99, dead=0.01, counting=False)
    """

    alike: float = 0.95
    dead: float = 0.01
    counting: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.alike <= 1 or not 0 <= self.dead < 1:
            raise InvalidInputError(f"merging needs 0 < alike ≤ 1 and 0 ≤ dead < 1, not {self.alike} and {self.dead}")
        if self.counting and not self.dead:
            raise InvalidInputError("counting compares the sizes of candidates, and a size may be 0; give dead > 0")


@dataclass(frozen=True)
class Merged:
    """The candidates that remain."""

    x: Tensor
    multipliers: Tensor
    labels: Tensor | None
    kept: Tensor
    """(k',) the previous index of the candidate with the largest multiplier in each group of duplicates."""
    sizes: Tensor
    """(k',) ‖λ_i f(x_i)‖."""

    def __getitem__(self, some: Tensor) -> Merged:
        labels = None if self.labels is None else self.labels[some]
        return Merged(self.x[some], self.multipliers[some], labels, self.kept[some], self.sizes[some])


def merge(
    objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None, policy: Merging | None = None
) -> Merged:
    """Merge each group of duplicates among candidates x (k, *image_shape), then drop the dead ones.

    Examples:
        >>> import palimpsest as pal
        >>> objective = pal.KKT(pal.networks.MLP(4, hidden=(8,)), signed=True)
        >>> x = torch.randn(1, 4).repeat(2, 1)
        >>> len(pal.merging.merge(objective, x, torch.ones(2), None).x)
        1
    """
    if objective.live:
        raise InvalidInputError("candidates that share live batch normalisation do not merge; leave merging out")
    policy = policy or Merging()
    λ = multipliers.reshape(len(x), -1)
    copies = _copies(x, multipliers, labels, policy.alike)
    group = torch.from_numpy(connected_components(copies.cpu().numpy())[1]).long().to(x.device)  # copies of copies, too
    member = torch.nn.functional.one_hot(group).to(x).T  # (groups, k)
    weight = member * λ.norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    mean = (weight / weight.sum(1, keepdim=True)) @ x.flatten(1)
    kept = weight.argmax(1)
    x = torch.where((member.sum(1) > 1)[:, None], mean, x[kept].flatten(1)).reshape(-1, *x.shape[1:])
    multipliers = (member @ λ).reshape(-1, *multipliers.shape[1:])
    labels = None if labels is None else labels[kept]
    sizes = contributions(objective, x, multipliers, labels)
    return Merged(x, multipliers, labels, kept, sizes)[sizes >= policy.dead * sizes.max()]


def images(sizes: Tensor) -> int | None:
    """Count the candidates that show images, from their sizes ‖λ_i f(x_i)‖. None if the two kinds cannot be separated.

    The logarithms of the sizes of both kinds are modelled as normal, with mean μ_c, deviation σ_c and share p_c. The
    best threshold minimises J = Σ_c p_c log(σ_c / p_c) (Kittler and Illingworth 1986). Two kinds are better than one if
    k J is below k log σ by more than the cost of three more parameters, (3/2) log k (after Schwarz 1978). The second
    kind must also be far smaller, e^(μ_1 − μ_2) > 2.5. Images whose sizes differ as much may be mistaken for two kinds.

    Examples:
        >>> images(torch.tensor([0.9, 1.1, 0.8, 1.2, 1.0, 0.02, 0.03, 0.02, 0.01, 0.04]))
        5
        >>> images(torch.tensor([0.9, 1.1, 0.8, 1.2, 1.0, 0.7, 0.6, 0.5, 1.3, 1.4])) is None
        True
    """
    k, logs = len(sizes), sizes.double().log().sort(descending=True).values
    least, σ = max(FEWEST, math.ceil(SMALLEST * k)), logs.std(correction=0)
    if k < 2 * least:
        return None
    J = torch.stack([_misfit(logs[:count], σ, k) + _misfit(logs[count:], σ, k) for count in range(1, k)])
    count = 1 + int(J.argmin())
    better = k * (σ.log() - J.min()) > 1.5 * math.log(k)
    far = logs[:count].mean() - logs[count:].mean() > math.log(FAR)
    return count if better and far and least <= count <= k - least else None


def _misfit(logs: Tensor, σ: Tensor, k: int) -> Tensor:
    """p_c log(σ_c / p_c) of one kind among k. σ_c has a floor, because a few sizes may be equal by chance."""
    p_c, σ_c = len(logs) / k, torch.maximum(logs.std(correction=0), SMALLEST * σ)
    return p_c * (σ_c / p_c).log()


def largest(sizes: Tensor, count: int) -> Tensor:
    """The indices of the largest ``count`` sizes, in ascending order."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values


def contributions(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
    """(k,) ‖λ_i f(x_i)‖, the size of each candidate's contribution."""
    layers, k = objective.bind(x, multipliers, labels).layers, len(x)
    x, λ, labels = objective.mine(x, multipliers, labels)
    if objective.live:  # the others stay in the batch
        alone = [(x, torch.zeros_like(λ).index_copy(0, i, λ[i]), labels) for i in torch.arange(k)[:, None].to(x.device)]
    else:
        alone = [(x[i], λ[i], None if labels is None else labels[i]) for i in torch.arange(len(x))[:, None]]
    squares = [objective.length_squared(objective.explained(layers, *one)) for one in alone]
    return objective.joined(torch.stack(squares).sqrt(), k)


def _copies(x: Tensor, multipliers: Tensor, labels: Tensor | None, alike: float) -> Tensor:
    """(k, k) whether two candidates are duplicates."""
    flat, λ = x.flatten(1), multipliers.reshape(len(x), -1)
    square = flat.square().sum(1)
    # By distances, because in single precision the similarity of equal candidates need not be exactly 1.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
    same = (λ @ λ.T >= 0) & (distance <= (1 - alike) * (square[:, None] + square))
    return same if labels is None else same & (labels[:, None] == labels)
