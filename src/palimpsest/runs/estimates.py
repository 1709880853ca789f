"""Rough lower bounds on the memory and disk that a job needs, to refuse a job that cannot fit."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from palimpsest.execution.resources import require_disk, require_memory
from palimpsest.solver.lanczos import BASIS

NUMBER = 4  # bytes
COPIES = 8  # of the weights while they are trained or read: network, start, target, tangents, gradients
ACTIVATIONS = 8  # of each unit for each image or candidate: both passes, and their derivatives
SNAPSHOTS = 30  # of the candidates, kept on their way


def parameters(widths: Sequence[int]) -> int:
    """Weights between layers of these widths, and a bias in the first."""
    return sum(a * b for a, b in pairwise(widths)) + widths[1]


def check_training(folder: Path, widths: Sequence[int], images: int) -> None:
    """Refuse a training that cannot fit."""
    memory = COPIES * parameters(widths) + ACTIVATIONS * images * sum(widths)
    require_memory(NUMBER * memory, of="training", remedy="use narrower --hidden layers or fewer images --per-class")
    require_disk(folder, NUMBER * 2 * parameters(widths), of="training")


def check_reconstruction(folder: Path, widths: Sequence[int], candidates: int, *, tangents: int, variants: int) -> None:
    """Refuse a reconstruction that cannot fit."""
    pixels = candidates * widths[0]
    memory = COPIES * tangents * parameters(widths) + ACTIVATIONS * tangents * candidates * sum(widths) + BASIS * pixels
    require_memory(NUMBER * memory, of="the reconstruction", remedy="use fewer --candidates")
    require_disk(folder, NUMBER * variants * SNAPSHOTS * pixels, of="the reconstruction")
