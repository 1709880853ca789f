"""Recipes that are stated in raw numbers, as those of the literature are.

The solver takes its steps in natural units, which makes a run blind to the scale of a network. A published recipe is
not: its initial values, its rates and its penalties belong to the loss

    L = Σ_p w_p ‖T_p − (1/k) Σ_i λ_i f_p(x_i)‖² + penalties,

with the mean over the k candidates in place of the sum. Our multipliers are λ_i/k, so that 1/k is their unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class RawUnits:
    """Start and steps in the raw numbers of a published recipe, for ``pal.reconstruct(…, units=…)``.

    The learning rate acts on the gradient of L itself, not of L / ‖T‖². Penalties are added to L as they are, and see
    the multipliers λ_i of the mean over candidates. Multipliers are not kept above zero: a penalty does that.

    Args:
        pixels: the standard deviation of the initial pixels.
        multipliers: the distribution of the initial λ: ``"uniform"`` on [0, 1], ``"centred"``, which is uniform on
            [−½, ½], or ``"normal"``.
        multiplier_rate: the learning rate of the multipliers. None is that of the images.

    Examples:
        >>> RawUnits(pixels=0.2, multipliers="centred").multiplier_rate is None
        True
    """

    pixels: float
    multipliers: Literal["uniform", "centred", "normal"] = "uniform"
    multiplier_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.pixels > 0 or not (self.multiplier_rate is None or self.multiplier_rate > 0):
            raise InvalidInputError("raw units need pixels > 0 and multiplier_rate > 0")
        if self.multipliers not in ("uniform", "centred", "normal"):
            raise InvalidInputError(f"multipliers is {self.multipliers!r}; choose uniform, centred or normal")

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Initial λ, in float64."""
        if self.multipliers == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        noise = torch.rand(shape, generator=generator, dtype=torch.float64)
        return noise - 0.5 if self.multipliers == "centred" else noise


@dataclass(frozen=True, kw_only=True)
class Sharpening:
    """β = min(offset + 10^(step / decade), most), the schedule of Loo et al. (2024).

    Args:
        steps: the steps of a phase, over which β grows.
        offset: β at the start is 1 more than this.
        decade: the steps in which the power of ten grows tenfold.
        most: the largest β.

    Examples:
        >>> schedule = Sharpening(steps=80_000)
        >>> schedule.at(0.0), schedule.at(0.25), schedule.at(1.0)
        (11.0, 20.0, 200.0)
    """

    steps: int
    offset: float = 10.0
    decade: float = 20_000.0
    most: float = 200.0

    def __post_init__(self) -> None:
        if not (self.steps > 0 and self.offset >= 0 and self.decade > 0 and self.most > 0):
            raise InvalidInputError("sharpening needs steps, decade and most above 0, and an offset of at least 0")

    def at(self, t: float) -> float:
        """β when the share t of a phase has passed."""
        return min(self.offset + 10 ** (t * self.steps / self.decade), self.most)
