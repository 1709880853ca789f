"""The evaluations as `identify` was given them: validated, in double precision, at unit scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.identifiability import partial
from palimpsest.identifiability.inputs import check_degree, check_finite


@dataclass(frozen=True)
class Problem:
    """Points and values scaled to unit root mean square, and what the caller knows about them.

    Attributes:
        noise: the accuracy of the values that is presumed at the moment, relative to their root mean square.
        rounding: the least it can be, from the floating-point type of the values.
        declared: whether the caller vouches for the noise.
        unit: weights in the caller's units per weight in ours.
    """

    points: Tensor
    values: Tensor
    degree: int
    bias: bool
    norm: float | None
    count: int | None
    noise: float
    rounding: float
    declared: bool
    unit: float

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
    ) -> Problem:
        check_degree(degree)
        w, F = torch.as_tensor(points).detach(), torch.as_tensor(values).detach()
        if w.dim() != 2 or F.shape not in (w.shape, w.shape[:1]) or not w.numel():
            raise InvalidInputError(
                f"points {tuple(w.shape)} and values {tuple(F.shape)} do not fit; give (m, d) and (m, d) or m"
            )
        if bias and w.shape[1] < 2:
            raise InvalidInputError("the points hold nothing beside the bias; give one coordinate or more before it")
        if norm is not None and (bias or not 0 < norm < math.inf):
            raise InvalidInputError("norm must be positive, and a bias already fixes it; give one of the two")
        if count is not None and not (isinstance(count, Integral) and count >= 1):
            raise InvalidInputError(f"count is {count}; give the number of active samples, or leave it out")
        if noise is not None and not 0 < noise < 1:
            raise InvalidInputError(f"noise is {noise}; give the relative error of the values, in (0, 1)")
        check_finite("points or values", w, F)
        rounding = 100 * max(torch.finfo(t.dtype).eps if t.is_floating_point() else 2e-16 for t in (w, F))
        w, F = w.to("cpu", torch.float64), F.to("cpu", torch.float64)
        ω, ν = (float(t.square().mean().sqrt()) or 1.0 for t in (w, F))
        unit = ν / ω ** (degree - 1 if F.dim() == 2 else degree)
        presumed, declared = noise or rounding, noise is not None
        return cls(w / ω, F / ν, degree, bias, norm, count, presumed, rounding, declared, unit)

    @property
    def scalar(self) -> bool:
        """Whether the values are p(w_j) rather than f(w_j)."""
        return self.values.dim() == 1

    @property
    def levels(self) -> list[float]:
        """Noise to presume: the declared one, or else rounding, then ever more of it."""
        more = [] if self.declared else [10.0**k for k in range(-13, -2) if 10.0**k > 2 * self.noise]
        return [self.noise, *more]

    @property
    def estimated(self) -> bool:
        return not self.declared and self.noise > self.rounding

    @property
    def allowed(self) -> float:
        """The largest relative misfit that the noise explains: declared noise is known to about 1/√equations."""
        return self.noise * (1 + 6 / self.values.numel() ** 0.5) if self.declared else 5 * self.noise

    @property
    def rank(self) -> int:
        """Dimension of the span of the samples at the presumed noise; −1 where scalar values do not tell."""
        return -1 if self.scalar else partial.span(self.values, self.noise)[0].shape[1]
