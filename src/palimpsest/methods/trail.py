"""The trail of a training, its checkpoints: whether their order is right, and a choice among many.

The weights move away from the start. A checkpoint in the wrong place makes the trail go back and forth, so it becomes
far longer than the trail by the distance from the start. The first and the last checkpoint keep their places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

Weights = Mapping[str, Tensor]
SHORTER = 1.25  # times: a trail that is so much shorter speaks for its order, because a training turns back a little


def better_order(trail: Sequence[Weights]) -> list[int]:
    """The checkpoints by their distance from the first, if their trail is then far shorter; else [].

    >>> import torch
    >>> better_order([{"w": torch.tensor([t])} for t in (0.0, 3.0, 1.0, 2.0, 4.0)])
    [0, 2, 3, 1, 4]
    """
    start = trail[0]
    inner = sorted(range(1, len(trail) - 1), key=lambda j: distance(start, trail[j]))
    order = [0, *inner, len(trail) - 1]
    return order if length(trail) > SHORTER * length([trail[j] for j in order]) else []


def spread(trail: Sequence[Weights], segments: int) -> list[int]:
    """The checkpoints between at most ``segments`` segments, at about equal distances from the first.

    >>> import torch
    >>> spread([{"w": torch.tensor([t])} for t in (0.0, 0.1, 0.2, 1.1, 1.9, 3.0)], 3)
    [0, 3, 4, 5]
    """
    last = len(trail) - 1
    if last <= segments:
        return list(range(len(trail)))
    far = [distance(trail[0], θ) for θ in trail]
    wanted = [far[last] * j / segments for j in range(1, segments)]
    nearest = {min(range(1, last), key=lambda j, d=d: abs(far[j] - d)) for d in wanted}  # type: ignore[misc]
    return [0, *sorted(nearest), last]


def distance(a: Weights, b: Weights) -> float:
    return math.sqrt(sum(float((b[name] - a[name]).double().square().sum()) for name in a))


def length(trail: Sequence[Weights]) -> float:
    return sum(distance(a, b) for a, b in pairwise(trail))
