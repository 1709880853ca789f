"""What independent restarts agree on.

Candidates that start from different noise and end alike were led there by the weights. Alike is measured by the
normalised cross-correlation, which does not see brightness and contrast; candidates that are alike, within one restart
or over several, are merged into one. Poor copies of a candidate are marked; the ranking does not show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.scoring.metrics import pairwise_ncc

ALIKE = 0.8  # correlation from which two candidates are one
SIMILAR = 0.7  # correlation from which one may be a poor copy of the other; so may be two different faces
NEGLIGIBLE = 1e-4  # share of ‖T‖² below which a candidate is what the prior leaves, not what the weights say


@dataclass(frozen=True)
class Run:
    """One restart: candidates (k, C, H, W), the share of ‖T‖² that each represents, and the loss it ended with."""

    images: Tensor
    contributions: Tensor
    loss: float


@dataclass(frozen=True)
class Agreed:
    """Distinct candidates, those that restarts agree on most first."""

    images: Tensor
    agreement: Tensor
    """(n,) mean over the other restarts of the best correlation with any of their candidates."""
    copies: Tensor
    """(n,) how many candidates of a restart, on average, are alike to each, itself included."""
    crowding: float
    """Median of the best correlation of a distinct candidate with another: how alike different images look here."""
    explained: float
    """Share of ‖T‖² that the restarts explain."""
    originals: Tensor
    """(n,) of which other candidate each is a poor copy, or −1."""

    def __len__(self) -> int:
        return len(self.images)


def agree(runs: Sequence[Run]) -> Agreed:
    """Merge the candidates of several restarts, and measure how far the restarts agree on each.

    >>> noise = [torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    >>> face = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    >>> found = agree([Run(torch.cat([face, n]), torch.ones(4), 0.0) for n in noise])
    >>> bool(found.agreement[0] > 0.99 > 0.6 > found.agreement[1]), len(found)
    (True, 7)
    """
    numbers = torch.cat([torch.full((len(run.images),), i) for i, run in enumerate(runs)])
    images, contributions = (torch.cat([getattr(run, name) for run in runs]) for name in ("images", "contributions"))
    alive = contributions > NEGLIGIBLE
    images, numbers = images[alive], numbers[alive]
    explained = 1 - float(torch.tensor([run.loss for run in runs]).median())
    if len(images) == 0:
        return Agreed(images, torch.zeros(0), torch.zeros(0), 0.0, explained, torch.zeros(0, dtype=torch.long))
    ncc = pairwise_ncc(images, images)
    best = torch.stack([_best(ncc, numbers == i) for i in range(len(runs))], dim=1)  # (candidates, restarts)
    others = numbers[:, None] != torch.arange(len(runs))
    agreement = (best * others).sum(1) / max(1, len(runs) - 1)
    leaders = _merged(ncc, agreement)
    copies = (ncc[leaders] > ALIKE).float().sum(1) / len(runs)
    crowding, originals = _crowding(ncc[leaders][:, leaders]), _originals(ncc, numbers, leaders)
    return Agreed(images[leaders], agreement[leaders].float(), copies, crowding, explained, originals)


def _best(ncc: Tensor, columns: Tensor) -> Tensor:
    return ncc[:, columns].amax(1) if bool(columns.any()) else ncc.new_zeros(len(ncc))


def _crowding(ncc: Tensor) -> float:
    if len(ncc) < 2:
        return 0.0
    itself = torch.eye(len(ncc), dtype=torch.bool, device=ncc.device)
    return float(ncc.masked_fill(itself, -1).amax(1).median())


def _merged(ncc: Tensor, agreement: Tensor) -> list[int]:
    """One candidate of each kind, in order of agreement: the first stands for all that are like it."""
    free, leaders = torch.ones(len(ncc), dtype=torch.bool), []
    for i in agreement.argsort(descending=True, stable=True).tolist():
        if free[i]:
            leaders.append(i)
            free &= ncc[i] <= ALIKE
            free[i] = False
    return leaders


def _originals(ncc: Tensor, numbers: Tensor, leaders: list[int]) -> Tensor:
    """Which other leader's copies, known to several restarts, are the best matches of each in all other restarts.

    What speaks for such a candidate then speaks for that leader. Similarity alone cannot tell a poor copy from a
    different picture of the same kind; but a different picture that several restarts found has matches of its own.
    """
    group = (ncc[:, leaders] > ALIKE).float().argmax(1)
    group[leaders] = torch.arange(len(leaders))
    restarts = {int(number): (numbers == number).nonzero().flatten() for number in numbers.unique()}
    originals = torch.full((len(leaders),), -1)
    for i, leader in enumerate(leaders):
        elsewhere = [members for number, members in restarts.items() if number != int(numbers[leader])]
        matches = {int(group[members[ncc[leader, members].argmax()]]) for members in elsewhere}
        if len(matches) == 1 and i not in matches:
            (other,) = matches
            if len(numbers[group == other].unique()) > 1 and ncc[leader, leaders[other]] > SIMILAR:
                originals[i] = other
    return originals
