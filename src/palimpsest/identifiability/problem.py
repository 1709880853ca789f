"""The evaluations that `identify` was given: checked, in double precision, at unit scale."""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Self

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.identifiability import partial


def check_degree(degree: int) -> None:
    """Exact recovery needs α ≥ 3, because f of degree one or two is only a moment of the data."""
    if not isinstance(degree, Integral) or degree < 3:
        raise InvalidInputError(f"degree {degree} does not determine the data; give a whole number, 3 or more")


def check_finite(what: str, *tensors: Tensor) -> None:
    """Real numbers without NaN or infinity."""
    if any(t.is_complex() for t in tensors):
        raise InvalidInputError(f"{what} are complex; give real numbers")
    if not all(torch.isfinite(t).all() for t in tensors):
        raise NonFiniteError(f"{what} contain NaN or infinity; remove or correct these entries")


@dataclass(frozen=True)
class Problem:
    """Points and values scaled to unit root mean square, and what the caller knows about them."""

    points: Tensor
    values: Tensor
    degree: int
    bias: bool
    norm: float | None
    count: int | None
    noise: float  # the accuracy of the values assumed at the moment, relative to their root mean square
    rounding: float  # the best possible accuracy, from the floating-point type of the values
    declared: bool  # whether the caller gave the noise
    unit: float  # weights in the caller's units per weight in ours

    @classmethod
    def prepare(
        cls,
        points: Tensor | np.ndarray,
        values: Tensor | np.ndarray,
        degree: int,
        bias: bool,
        norm: float | None,
        count: int | None,
        noise: float | None,
    ) -> Self:
        w, F = torch.as_tensor(points).detach(), torch.as_tensor(values).detach()
        check_degree(degree)
        if w.dim() != 2 or F.shape not in (w.shape, w.shape[:1]) or w.numel() == 0 or (bias and w.shape[1] < 2):
            raise InvalidInputError(
                f"points {tuple(w.shape)} and values {tuple(F.shape)} do not match; give points (m, d), with a bias "
                "d > 1, and values (m, d) or (m,)"
            )
        if norm is not None and (bias or not 0 < norm < math.inf):
            raise InvalidInputError(f"norm is {norm}; give a positive number, or a bias instead, which fixes the norm")
        if count is not None and not (isinstance(count, Integral) and count >= 1):
            raise InvalidInputError(f"count is {count}; give the number of active samples, or leave it out")
        if noise is not None and not 0 < noise < 1:
            raise InvalidInputError(f"noise is {noise}; give the relative error of the values, between 0 and 1")
        check_finite("points or values", w, F)
        rounding = 100 * max(torch.finfo(t.dtype).eps if t.is_floating_point() else 2e-16 for t in (w, F))
        w, F = w.to("cpu", torch.float64), F.to("cpu", torch.float64)
        ω, ν = (float(t.square().mean().sqrt()) or 1.0 for t in (w, F))
        unit = ν / ω ** (degree - 1 if F.dim() == 2 else degree)
        return cls(w / ω, F / ν, degree, bias, norm, count, noise or rounding, rounding, noise is not None, unit)

    @property
    def scalar(self) -> bool:
        """Whether the values are p(w_j) and not f(w_j)."""
        return self.values.dim() == 1

    @property
    def levels(self) -> list[float]:
        """The noise to try: the declared one, or rounding and then ever more."""
        more = [] if self.declared else [10.0**k for k in range(-13, -2) if 10.0**k > 2 * self.noise]
        return [self.noise, *more]

    @property
    def estimated(self) -> bool:
        return not self.declared and self.noise > self.rounding

    @property
    def allowed(self) -> float:
        """The largest relative misfit that the noise explains. Declared noise is known to about 1/√equations."""
        return self.noise * (1 + 6 / self.values.numel() ** 0.5) if self.declared else 5 * self.noise

    @property
    def rank(self) -> int:
        """Dimension of the span of the samples at the assumed noise; −1 if scalar values do not tell."""
        return -1 if self.scalar else partial.span(self.values, self.noise).dimension
