"""The checks of arguments that the functions of this package share."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NonFiniteError


def check_degree(degree: int, *, least: int = 3) -> None:
    """Exact recovery needs α ≥ 3, because f of degree one or two is only a moment of the data."""
    if not isinstance(degree, Integral) or degree < least:
        raise InvalidInputError(f"degree {degree} does not determine the data; give a whole number, {least} or more")


def check_finite(what: str, *tensors: Tensor) -> None:
    """Real numbers without NaN or infinity."""
    if any(t.is_complex() for t in tensors):
        raise InvalidInputError(f"{what} are complex; give real numbers")
    if not all(torch.isfinite(t).all() for t in tensors):
        raise NonFiniteError(f"{what} contain NaN or infinity; remove or correct these entries")


def check_samples(samples: Tensor, weights: Tensor) -> None:
    """Samples (n, d), at least one, with a weight b_i ≠ 0 each."""
    if samples.dim() != 2 or weights.shape != samples.shape[:1] or not samples.numel() or not weights.all():
        raise InvalidInputError(
            f"samples {tuple(samples.shape)} and weights {tuple(weights.shape)} do not match; "
            "give samples (n, d) and n weights other than zero"
        )
    check_finite("samples or weights", samples, weights)
