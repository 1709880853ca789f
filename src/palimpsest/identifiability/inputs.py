"""What every entrance of this package asks of its arguments, refused by name where it is not given."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NonFiniteError


def check_degree(degree: int, *, least: int = 3) -> None:
    """A whole α: three or more for exact recovery, as f of degree one or two is a moment of the data.

    >>> check_degree(2)
    Traceback (most recent call last):
    palimpsest.errors.InvalidInputError: degree 2 determines only a moment of the data; use 3 or more
    """
    if not isinstance(degree, Integral) or degree < 1:
        raise InvalidInputError(f"degree is {degree}; give a whole number, {least} or more")
    if degree < least:
        raise InvalidInputError(f"degree {degree} determines only a moment of the data; use 3 or more")


def check_finite(what: str, *tensors: Tensor) -> None:
    """Real numbers without NaN or infinity."""
    if any(t.is_complex() for t in tensors):
        raise InvalidInputError(f"{what} are complex; give real numbers")
    if not all(torch.isfinite(t).all() for t in tensors):
        raise NonFiniteError(f"{what} hold NaN or infinity; leave those out or mend them")


def check_samples(samples: Tensor, weights: Tensor) -> None:
    """Samples (n, d), at least one, with a weight b_i ≠ 0 each."""
    if samples.dim() != 2 or weights.shape != samples.shape[:1] or not samples.numel() or not weights.all():
        raise InvalidInputError(
            f"samples {tuple(samples.shape)} and weights {tuple(weights.shape)} do not fit; "
            "give samples (n, d) and n weights, none of them zero"
        )
    check_finite("samples or weights", samples, weights)
