"""Which candidate stands for which image?

Every rule reads a matrix of similarities ``(images, candidates)``. It does not know which images were trained on: all
compete for candidates in one pool. A verdict always uses the nearest candidate; the other rules are for scores.
"""

from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from palimpsest.errors import InvalidInputError

MatchingRule = Literal["nearest", "best-buddies", "one-to-one"]
UNMATCHED = -1


def match(similarity: Tensor, *, rule: MatchingRule = "nearest") -> Tensor:
    """The candidate of each image, or −1.

    Args:
        similarity: ``(n, k)``, larger is more alike.
        rule: ``"nearest"``: the most similar candidate, which may serve several images, as in the literature.
            ``"best-buddies"``: the most similar of those candidates whose own most similar image this one is.
            ``"one-to-one"``: the assignment with the largest total similarity, each candidate used at most once.

    Examples:
        >>> s = torch.tensor([[0.9, 0.8], [0.7, 0.1], [0.2, 0.3]])
        >>> [match(s, rule=r).tolist() for r in ("nearest", "best-buddies", "one-to-one")]
        [[0, 0, 1], [0, -1, -1], [1, 0, -1]]
    """
    if rule == "one-to-one":
        rows, columns = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
        index = torch.full((len(similarity),), UNMATCHED)
        index[torch.from_numpy(rows)] = torch.from_numpy(columns)
        return index.to(similarity.device)
    best, index = eligible(similarity, rule=rule).max(1)
    return index.masked_fill(best == -torch.inf, UNMATCHED)


def eligible(similarity: Tensor, *, rule: MatchingRule) -> Tensor:
    """The similarities, with −∞ for pairs that the rule does not allow."""
    if rule == "nearest":
        return similarity
    if rule == "best-buddies":
        mine = torch.arange(len(similarity), device=similarity.device)[:, None] == similarity.argmax(0)
        return similarity.masked_fill(~mine, -torch.inf)
    raise InvalidInputError(f"matching is {rule!r}; choose 'nearest', 'best-buddies' or 'one-to-one'")


def vote(candidates: Tensor, similarity: Tensor, *, rule: MatchingRule, ratio: float = 1.1) -> Tensor:
    """For each image the mean of the candidates about as near to it as the nearest one, ``(n, …)``.

    These are the allowed candidates whose distance 1 − similarity is at most ``ratio`` times the least. The mean is
    zero if there are none.
    """
    if rule == "one-to-one":
        raise InvalidInputError("voting needs several candidates per image; use another rule than one-to-one")
    distance = 1 - eligible(similarity, rule=rule)
    nearest = distance.amin(1, keepdim=True)
    voters = ((distance <= ratio * nearest) & distance.isfinite()).to(candidates)
    mean = voters @ candidates.flatten(1) / voters.sum(1, keepdim=True).clamp_min(1)
    return mean.view(-1, *candidates.shape[1:])
