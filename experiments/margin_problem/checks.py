"""The check that the functions of this package share."""

from __future__ import annotations

from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.identifiability.problem import check_finite


def check_samples(samples: Tensor, weights: Tensor) -> None:
    """Samples (n, d), at least one, with a weight b_i ≠ 0 each."""
    if samples.dim() != 2 or weights.shape != samples.shape[:1] or not samples.numel() or not weights.all():
        raise InvalidInputError(
            f"samples {tuple(samples.shape)} and weights {tuple(weights.shape)} do not match; "
            "give samples (n, d) and n weights other than zero"
        )
    check_finite("samples or weights", samples, weights)
