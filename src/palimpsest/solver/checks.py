"""Whether what was read back could have been written: a file may be damaged, or somebody's idea of a joke.

Each check raises a ValueError; whoever reads the file knows what to tell of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e300  # in size: beyond it, arithmetic with the figures of a run overflows
RECORD = ("loss", "objective", "gradient", "rate")
SPLIT = ("eta", "before", "after")


def require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(what)


def is_count(value: Any) -> bool:
    """A whole number as a clock or a counter shows it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_number(value: Any) -> bool:
    """A figure that arithmetic can bear; whole ones of any length do not fit into a float."""
    if isinstance(value, bool):
        return False
    return is_count(abs(value)) if isinstance(value, int) else isinstance(value, float) and abs(value) < LARGEST


def check_history(history: Any) -> None:
    """Records of steps and of splits, as the solver makes them."""
    require(isinstance(history, list), "the history is no list")
    for entry in history:
        require(isinstance(entry, dict) and is_count(entry.get("step")), "an entry of the history has no step")
        if "eigenvalues" in entry:
            values = entry["eigenvalues"]
            require(is_count(entry.get("split")), "a split of nothing")
            require(isinstance(values, list) and all(map(is_number, values)), "eigenvalues that are no numbers")
            counts = [entry[name] for name in ("among", "images") if name in entry]
            require(all(is_count(count) and count > 0 for count in counts), "counts of candidates that are none")
        else:
            require(is_count(entry.get("candidates")), "a record of no candidates")
        names = SPLIT if "eigenvalues" in entry else RECORD
        require(all(is_number(entry.get(name)) for name in names), "figures that are no numbers")


def check_candidates(x: Tensor, ids: Tensor) -> None:
    """Finite candidates, each with a number."""
    require(x.is_floating_point() and x.ndim > 1 and x.numel() > 0, "no candidates")
    require(bool(x.isfinite().all()), "candidates that are not finite")
    require(ids.dtype == torch.int64 and ids.shape == x.shape[:1] and bool((ids >= 0).all()), "no number for each")


def check_lineage(lineage: Tensor, ids: Tensor) -> None:
    """Everyone's parent is older: following parents comes to an end."""
    require(lineage.dtype == torch.int64 and lineage.ndim == 1, "no lineage")
    require(bool(((lineage >= -1) & (lineage < torch.arange(len(lineage)).to(lineage))).all()), "a circular lineage")
    require(bool((ids < len(lineage)).all()), "candidates without a lineage")


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0 and math.isfinite(1 / value)
