"""The settings of a run, and the numbers that they schedule for each step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.solver.merging import Merging
from palimpsest.solver.optimisers import Adam, Optimiser, Units
from palimpsest.solver.priors import Box, Prior, TotalVariation
from palimpsest.solver.splitting import Splitting
from palimpsest.solver.state import State


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. `pal.reconstruct` explains each of them."""

    candidates: int
    steps: int = 4000
    splitting: Splitting | None = None
    merging: Merging | None = None
    priors: Prior | Sequence[Prior] = (Box(), TotalVariation())
    optimiser: Optimiser = field(default_factory=Adam)
    schedule: Literal["cosine", "constant"] = "cosine"
    sharpness: tuple[float, float] | Callable[[float], float] | None = (10.0, 200.0)
    prior_strength: tuple[float, float] = (1.0, 1.0)
    gradient_tolerance: float = 0.0
    plateau: float = 0.0
    record_every: int | None = None
    units: Units | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        several = [self.priors] if isinstance(self.priors, Prior) else self.priors
        if not isinstance(several, Sequence) or not all(isinstance(prior, Prior) for prior in several):
            raise InvalidInputError("priors must be instances of pal.priors.Prior; write a subclass for your own")
        kinds: dict[str, tuple[type, ...]] = {"optimiser": (Optimiser,), "splitting": (Splitting, NoneType)}
        kinds |= {"merging": (Merging, NoneType), "units": (Units, NoneType)}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidInputError(f"{name} is a {type(value).__name__}; give an instance of {kind[0].__name__}")
        for name in ("candidates", "steps", "record_every"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise InvalidInputError(f"{name} is {count}; give at least 1")
        for name in ("sharpness", "prior_strength"):
            ends = getattr(self, name)
            if not (ends is None or callable(ends)) and min(ends) <= 0:
                raise InvalidInputError(f"{name} is {ends}; give two positive numbers")
        if self.schedule not in ("cosine", "constant"):
            raise InvalidInputError(f"schedule is {self.schedule!r}; choose cosine or constant")
        if self.merging is not None and self.splitting is None:
            raise InvalidInputError("merging takes place before each round of splitting; give a splitting too")

    @property
    def rounds(self) -> int:
        """The number of rounds of splitting."""
        return 0 if self.splitting is None else self.splitting.rounds

    @property
    def counts_images(self) -> bool:
        return self.merging is not None and self.merging.counting


class Scheduled(NamedTuple):
    """The numbers that change from step to step: a row of the schedule, which lies on the device."""

    sharpness: Any
    prior_strength: Any
    rate: Any
    unbias: Any


@dataclass(frozen=True)
class Schedule:
    """The numbers of each step of a phase. t, from 0 to 1, is the share of its phase that has passed."""

    settings: Settings
    own_sharpness: float | Tensor | None  # of the objective: it is kept if the settings do not give one

    def phase_end(self, state: State) -> int:
        """The steps before the last round are shared out evenly among the phases; one last phase takes the rest."""
        rounds_left = self.settings.rounds - state.round
        if rounds_left <= 0:
            return self.settings.steps
        assert self.settings.splitting is not None
        last = round(self.settings.splitting.last_round * self.settings.steps)
        return state.phase_start + max(0, math.ceil((last - state.phase_start) / rounds_left))

    def elapsed(self, state: State, step: int) -> float:
        """t at a step."""
        return (step - state.phase_start) / (self.phase_end(state) - state.phase_start)

    def rate(self, t: float) -> float:
        """½(1 + cos πt): the learning rate falls over each phase and restarts after every split; or 1 throughout."""
        return 1.0 if self.settings.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * t))

    def sharpness(self, t: float, step: int) -> float | Tensor | None:
        """β_0 (β_1/β_0)^t, or by a schedule of its own, which a new phase does not restart."""
        given = self.settings.sharpness
        if callable(given):
            return given(step / self.settings.steps)
        return self.own_sharpness if given is None else _geometric(*given, t)

    def at(self, state: State, step: int) -> Scheduled:
        t = self.elapsed(state, step)
        β, strength = self.sharpness(t, step), _geometric(*self.settings.prior_strength, t)
        pace = self.settings.optimiser.pace(step + 1, self.rate(t))
        return Scheduled(0.0 if β is None else float(β), strength, *pace)


def _geometric(start: float, end: float, t: float) -> float:
    """From start to end as t goes from 0 to 1, by equal factors."""
    return start * (end / start) ** t
