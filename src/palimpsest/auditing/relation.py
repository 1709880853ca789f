"""Whether two sets of weights belong to one training."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch import Tensor

from palimpsest.errors import InvalidInputError

SIGMAS = 6.0  # standard errors from zero, beyond which a correlation is not chance
FOREIGN = 0.25  # correlation below which consecutive checkpoints are unrelated, also in a network of few weights

Weights = Mapping[str, Tensor]


def relation(θ: Weights, θ_0: Weights) -> tuple[float, bool]:
    """Correlation of the weight matrices before and after training, and whether it is beyond chance.

    Each matrix is centred, because gains that start at one correlate with any other gains. Two unrelated
    initialisations of P weights correlate by 0 ± 1/√P. Constant matrices, such as a head that starts at zero, say
    nothing.
    """
    pairs = [(θ[n].double(), θ_0[n].double()) for n in θ if θ[n].ndim > 1 and θ[n].numel() > 1]
    centred = [(a - a.mean(), b - b.mean()) for a, b in pairs]
    centred = [(a, b) for a, b in centred if bool(a.any()) and bool(b.any())]
    if not centred:
        return 1.0, True
    scores = [float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)) for a, b in centred]
    sizes = [a.numel() for a, _ in centred]
    z = sum(score * size for score, size in zip(scores, sizes, strict=True)) / math.sqrt(sum(sizes))
    return z / math.sqrt(sum(sizes)), z > SIGMAS


def check_one_training(way: Iterable[tuple[str, Weights]], names: Iterable[str]) -> None:
    """Refuse named weights on the way of which one belongs to another training than its neighbour."""
    trained = list(names)
    for (one, a), (other, b) in pairwise((name, {n: θ[n] for n in trained}) for name, θ in way):
        correlation, related = relation(a, b)
        if not related and correlation < FOREIGN:
            unrelated = f"the weights of {one} and {other} are unrelated"
            raise InvalidInputError(f"{unrelated}; give only files of the training that is audited")
