"""How to audit: every choice that a user can make."""

from dataclasses import dataclass
from typing import Annotated, Literal

from palimpsest.files.schema import Positive, Range
from palimpsest.runs.problems import Rule

RungName = Literal["W", "W0", "C", "O"]
Minutes = Annotated[float, Range(above=0)]
Restarts = Annotated[int, Range(least=2)]
Strength = Annotated[float, Range(least=0)]
RESERVE, LEAST_RESERVE = 0.05, 5.0  # share of the time, and seconds, kept for ranking, scoring and the report


@dataclass(frozen=True)
class Options:
    """How to audit. The audit chooses every option that is None."""

    minutes: Minutes = 10.0
    """Time limit in minutes, kept to within a tenth."""
    rungs: tuple[RungName, ...] | None = None
    """Attackers to try: W knows the final weights, W0 also the initial ones, C also checkpoints or updates, O also the
    optimiser's state. If omitted: all for which there is material. They share the time."""
    optimiser: Rule | None = None
    """Optimiser of the training: adam (also AdamW), or sgd. It changes how W0 and C read the change of the weights. If
    omitted: that of the optimiser's state, or sgd."""
    batch_norm: Literal["live", "fixed"] | None = None
    """Batch normalisation in training: live (statistics of each batch) or fixed. If omitted: live if the running
    statistics changed since the start of training."""
    weight_decay: bool = False
    """Whether training used weight decay. It changes how W reads the final weights."""
    samples: Positive | None = None
    """Number of training images, if known. The audit can often count them."""
    candidates: Positive | None = None
    """Candidates per restart. If omitted: twice the number of training images, and at least 80 if it is unknown."""
    steps: Positive | None = None
    """Gradient steps per restart."""
    restarts: Restarts | None = None
    """Number of independent restarts, at least two. If omitted: two, and up to twelve while there is time."""
    tangents: Literal[1, 2] | None = None
    """Tangent points of ntk, and of each segment of path. Two recover more, at twice the cost. After Adam, 1 and 2
    stand for 3 and 5 points of ntk, and for 1 and 2 of each segment."""
    control_steps: Positive | None = None
    """Maximum number of training steps for the positive control."""
    total_variation: Strength | None = None
    """Strength of the smoothness prior on images; 0 turns it off."""
    controls: bool = True
    """Whether to run the positive control. The negative control always runs."""
    seed: int = 0
    """Seed of the candidates and the controls."""

    @property
    def reserve(self) -> float:
        """The seconds that are kept for ranking, scoring and the report."""
        return max(RESERVE * 60 * self.minutes, LEAST_RESERVE)

    @property
    def complete(self) -> bool:
        """Whether the plan does not depend on the speed of the machine."""
        return None not in (self.steps, self.restarts, self.tangents, self.control_steps)
