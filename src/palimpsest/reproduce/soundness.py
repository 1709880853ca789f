"""Whether a file holds what a run of an experiment writes: it may be damaged, or edited by hand.

Each check raises a ValueError that says what is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palimpsest.checks import is_count, is_number, require

SCORES = {"ssim": (-1.0, 1.0), "l2": (0.0, 1e6)}  # of one image, smallest and largest


def check_result(result: Any, images: int) -> None:
    """A part of an experiment that trains on so many images."""
    for name in ("asked", "device", "verdict"):
        require(_is_line(result.get(name)), f"{name} is not a line of text")
    for name in ("steps", "final candidates", "candidate-steps", "recovered"):
        require(is_count(result.get(name)), f"{name} is not a whole number")
    for name in ("seconds", "loss"):
        require(is_number(result.get(name)) and result[name] >= 0, f"{name} is not a number of at least 0")
    check_training(result.get("training"))
    for name in SCORES:
        _check_scores(name, result.get(name), images)
        if name == "ssim" or f"held-out {name}" in result:  # early parts do not have the other
            _check_scores(f"held-out {name}", result.get(f"held-out {name}"))
    _check_entries("splits", result.get("splits"), ("split",))
    points = result.get("curve", [])
    _check_entries("curve", points, ("loss", *SCORES))
    ways = result.get("trajectories", [])
    require(isinstance(ways, list) and len(ways) in (0, len(points)), "trajectories do not have a row for each point")
    for scores in ways:
        require(_is_row(scores, images), "trajectories do not have a number for each image")


def check_training(facts: Any) -> None:
    """How the training of a network went."""
    require(isinstance(facts, dict), "training is not an object")
    for name in ("summary", "weights"):
        require(_is_line(facts.get(name)), f"{name} of the training is not a line of text")
    found = facts.get("images by the span")
    require(found is None or is_count(found), "images by the span is not a whole number")


def check_pictures(tensors: dict[str, Tensor], images: int) -> None:
    """Training images and the reconstruction of each, in bytes."""
    require({"truth", "shown"} <= tensors.keys(), "the images are missing")
    truth, shown = tensors["truth"], tensors["shown"]
    require(truth.shape == shown.shape and truth.ndim == 4 and len(truth) == images, "the images differ in shape")
    require(truth.dtype == shown.dtype == torch.uint8, "the images are not bytes")


def _check_scores(name: str, scores: Any, count: int | None = None) -> None:
    least, most = SCORES[name.removeprefix("held-out ")]
    require(_is_row(scores, count) and bool(scores), f"{name} does not have a number for each image")
    require(all(least <= score <= most for score in scores), f"{name} is not always from {least:g} to {most:g}")


def _check_entries(name: str, entries: Any, numbers: tuple[str, ...]) -> None:
    require(isinstance(entries, list), f"{name} is not a list")
    for entry in entries:
        require(isinstance(entry, dict) and is_count(entry.get("step")), f"{name} has an entry without a step")
        require(all(is_number(entry.get(number)) for number in numbers), f"{name} has an entry without a number")


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_row(values: Any, count: int | None) -> bool:
    return isinstance(values, list) and count in (None, len(values)) and all(map(is_number, values))
