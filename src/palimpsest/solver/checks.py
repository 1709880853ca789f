"""Checks of values that were read from a file, which may be damaged or forged. Each check raises a ValueError."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e300  # arithmetic with larger numbers overflows
RECORD = ("loss", "objective", "gradient", "rate")
SPLIT = ("eta", "before", "after")


def require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(what)


def is_count(value: Any) -> bool:
    """A whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_number(value: Any) -> bool:
    """A number that arithmetic can handle. Long integers do not fit into a float."""
    if isinstance(value, bool):
        return False
    return is_count(abs(value)) if isinstance(value, int) else isinstance(value, float) and abs(value) < LARGEST


def check_history(history: Any) -> None:
    """Records of steps and of splits."""
    require(isinstance(history, list), "the history is not a list")
    for entry in history:
        require(isinstance(entry, dict) and is_count(entry.get("step")), "an entry of the history without a step")
        if "eigenvalues" in entry:
            values = entry["eigenvalues"]
            require(is_count(entry.get("split")), "a split without a count")
            require(isinstance(values, list) and all(map(is_number, values)), "eigenvalues that are not numbers")
            counts = [entry[name] for name in ("among", "images") if name in entry]
            require(all(is_count(count) and count > 0 for count in counts), "counts that are not positive")
        else:
            require(is_count(entry.get("candidates")), "a record without candidates")
        names = SPLIT if "eigenvalues" in entry else RECORD
        require(all(is_number(entry.get(name)) for name in names), "values that are not numbers")


def check_candidates(x: Tensor, ids: Tensor) -> None:
    """Finite candidates, each with a number."""
    require(x.is_floating_point() and x.ndim > 1 and x.numel() > 0, "no candidates")
    require(bool(x.isfinite().all()), "candidates that are not finite")
    require(ids.dtype == torch.int64 and ids.shape == x.shape[:1] and bool((ids >= 0).all()), "candidates without ids")


def check_lineage(lineage: Tensor, ids: Tensor) -> None:
    """Every parent is older than its child, so a line of ancestors ends."""
    require(lineage.dtype == torch.int64 and lineage.ndim == 1, "no lineage")
    require(bool(((lineage >= -1) & (lineage < torch.arange(len(lineage)).to(lineage))).all()), "a circular lineage")
    require(bool((ids < len(lineage)).all()), "candidates without a lineage")


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0 and math.isfinite(1 / value)
