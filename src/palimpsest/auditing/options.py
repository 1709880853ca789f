"""How to audit: every choice that a user can make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from palimpsest.errors import InvalidInputError
from palimpsest.runs.problems import Method

MINIMUM = {"samples": 1, "candidates": 1, "steps": 1, "restarts": 2, "control_steps": 1, "seed": 0}


@dataclass(frozen=True)
class Options:
    """How to audit. The audit chooses every option that is None."""

    minutes: float = 10.0
    """Time limit in minutes, kept to within a tenth."""
    method: Method | None = None
    """ntk needs the initial weights, kkt (one output) and multiclass long training, kkt-signed weight decay."""
    weight_decay: bool = False
    """Whether training used weight decay."""
    samples: int | None = None
    """Number of training images, if known. The audit can often count them."""
    candidates: int | None = None
    """Candidates per restart. If omitted: twice the number of training images."""
    steps: int | None = None
    """Gradient steps per restart."""
    restarts: int | None = None
    """Number of independent restarts, at least two."""
    tangents: Literal[1, 2] | None = None
    """Tangent points of the NTK method. Two recover more, at twice the cost."""
    control_steps: int | None = None
    """Maximum number of training steps for the positive control."""
    total_variation: float | None = None
    """Strength of the smoothness prior on images; 0 turns it off."""
    controls: bool = True
    """Whether to run the positive control. The negative control always runs."""
    seed: int = 0
    """Seed of the candidates and the controls."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise InvalidInputError(f"minutes is {self.minutes}; give a positive number")
        for name, minimum in MINIMUM.items():
            if (value := getattr(self, name)) is not None and value < minimum:
                raise InvalidInputError(f"{name} is {value}; give at least {minimum}")

    @property
    def complete(self) -> bool:
        """Whether the plan does not depend on the speed of the machine."""
        return None not in (self.steps, self.restarts, self.tangents, self.control_steps)
