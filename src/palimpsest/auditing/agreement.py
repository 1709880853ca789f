"""The candidates on which independent restarts agree.

If candidates start from different noise and end alike, the weights led them there. Likeness is the normalised
cross-correlation (NCC), which ignores brightness and contrast. Candidates that are alike, within one restart or across
several, are merged into one. Poor copies of a candidate are marked; the ranking does not show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from palimpsest.scoring.metrics import pairwise_ncc

ALIKE = 0.8  # NCC above which two candidates are the same image
SIMILAR = 0.7  # NCC above which one may be a poor copy of the other; two different faces may reach it too
LONGEST = 1e9  # seconds that a restart may have taken
NEGLIGIBLE = 1e-4  # share of ‖T‖² up to which a candidate comes from the prior, not from the weights


@dataclass(frozen=True)
class Run:
    """One restart: candidates (k, C, H, W), the share of ‖T‖² that each represents, and the final loss."""

    images: Tensor
    contributions: Tensor
    loss: float
    seconds: float = 0.0  # the time since the restart began or, after an interruption, since it last continued
    device: str = ""  # where it was computed, in words

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Self:
        seconds, device = float(description.get("seconds", 0.0)), str(description.get("device", ""))
        seconds = seconds if 0 <= seconds < LONGEST else 0.0  # a file may hold anything
        return cls(tensors["images"], tensors["contributions"], float(description["loss"]), seconds, device)


@dataclass(frozen=True)
class Agreed:
    """Distinct candidates, those with the highest agreement first."""

    images: Tensor
    agreement: Tensor  # (n,) the best NCC with a candidate of another restart, averaged over the other restarts
    copies: Tensor  # (n,) the number of candidates per restart that are alike, including the candidate itself
    crowding: float  # median of the best NCC of a distinct candidate with another: how alike different images look here
    explained: float  # share of ‖T‖² that the restarts explain
    originals: Tensor  # (n,) the candidate of which each is a poor copy, or −1

    def __len__(self) -> int:
        return len(self.images)


def contributing(runs: Sequence[Run]) -> Tensor:
    """The candidates of all restarts that the weights shaped. Comparisons with known images use all of them.

    Different images of one kind may be more alike than ALIKE, and only one of them would survive a merge.
    """
    return torch.cat([run.images[run.contributions > NEGLIGIBLE] for run in runs])


def agree(runs: Sequence[Run]) -> Agreed:
    """Merge the candidates of several restarts, and measure the agreement of the restarts on each."""
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
    """One candidate of each kind, in order of agreement: the first represents all that are alike."""
    free, leaders = torch.ones(len(ncc), dtype=torch.bool), []
    for i in agreement.argsort(descending=True, stable=True).tolist():
        if free[i]:
            leaders.append(i)
            free &= ncc[i] <= ALIKE
            free[i] = False
    return leaders


def _originals(ncc: Tensor, numbers: Tensor, leaders: list[int]) -> Tensor:
    """The leader of which each leader is a poor copy: all its best matches in other restarts belong to that one.

    Similarity alone cannot tell a poor copy from a different picture of the same kind. But a different picture that
    several restarts found has matches of its own. The other leader must itself be known to several restarts.
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
