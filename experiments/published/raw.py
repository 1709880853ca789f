"""The raw numbers of published recipes: their units, the update rule and the schedule of β of Loo et al. (2024).

The solver takes its steps in natural units, which makes a run blind to the scale of a network. A published recipe is
not: its initial values, its rates and its penalties belong to the loss

    L = Σ_p w_p ‖T_p − (1/k) Σ_i λ_i f_p(x_i)‖² + penalties,

with the mean over the k candidates in place of the sum. Our multipliers are λ_i/k, so that 1/k is their unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.solver.optimisers import Adam, Moments, Pace


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
        steps: the steps of the run, over which β grows.
        offset: β at the start is 1 more than this.
        decade: the steps in which the power of ten grows tenfold.
        most: the largest β.

    Examples:
        >>> schedule = Sharpening(steps=80_000)
        >>> schedule(0.0), schedule(0.25), schedule(1.0)
        (11.0, 20.0, 200.0)
    """

    steps: int
    offset: float = 10.0
    decade: float = 20_000.0
    most: float = 200.0

    def __post_init__(self) -> None:
        if not (self.steps > 0 and self.offset >= 0 and self.decade > 0 and self.most > 0):
            raise InvalidInputError("sharpening needs steps, decade and most above 0, and an offset of at least 0")

    def __call__(self, t: float) -> float:
        """β when the share t of the run has passed."""
        return min(self.offset + 10 ** (t * self.steps / self.decade), self.most)


@dataclass(frozen=True, kw_only=True)
class LazyAdam(Adam):
    """Adam that leaves numbers alone whose gradient is exactly zero, with their memory (Loo et al. 2024).

    Each number counts its own steps.

    Examples:
        >>> rule, x = LazyAdam(learning_rate=0.5), torch.ones(2)
        >>> moments = rule.init(x)
        >>> for step in (1, 2):
        ...     rule.update_(x, torch.tensor([1.0, 0.0]), moments, rule.pace(step, 1.0))
        >>> [round(value, 3) for value in x.tolist()], moments["count"]
        ([0.0, 1.0], tensor([2., 0.]))
    """

    powers: ClassVar[dict[str, int]] = {"mean": 1, "square": 2, "count": 0}
    ε: float = 1e-8

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate)

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        mean, square, count = moments["mean"], moments["square"], moments["count"]
        moves = gradient != 0
        mean.copy_(torch.where(moves, self.β1 * mean + (1 - self.β1) * gradient, mean))
        square.copy_(torch.where(moves, self.β2 * square + (1 - self.β2) * gradient * gradient, square))
        count.add_(moves)
        taken = count.clamp_min(1)  # a number that never moved has no mean to correct
        m, v = mean / (1 - self.β1**taken), square / (1 - self.β2**taken)
        parameter.sub_(torch.where(moves, pace.rate * m / (v.sqrt() + self.ε), 0.0))
