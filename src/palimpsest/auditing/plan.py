"""What the audit will do, decided once from what is known and from the time there is, and then followed.

The plan is made after measuring how fast a step is, and kept: an audit that is resumed, on a busier machine, follows
the same plan to the same result.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from palimpsest.auditing.preflight import Preflight
from palimpsest.errors import InvalidInputError
from palimpsest.execution import Execution
from palimpsest.files.schema import built
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Settings, Solver

NODES = {1: (0.5,), 2: (0.15, 0.85)}  # tangent points of the NTK method
FEWEST_CANDIDATES, USUAL_CANDIDATES, MOST_CANDIDATES = 10, 80, 400
ENOUGH, PLENTY, LEAST = 1500, 4000, 100  # steps of a reconstruction
CONTROL_RUNS = 2  # of each control: agreement takes two
MOST_RESTARTS = 6
MOST_PUBLIC = 400  # images of the positive control; there are not many more
MOST_TRAINING = 10_000  # steps
MARGIN = 0.8  # of the measured speed is counted on: machines are shared
TRAINING_SHARE = 0.15  # of the time may go into training the positive control
RECORD_EVERY = 5  # steps at least: recording costs time, and the measured speed must hold for short runs too


@dataclass(frozen=True)
class Plan:
    """Every choice of an audit. What a user asks for replaces what would be chosen."""

    method: str
    at: tuple[float, ...]
    """Tangent points of the NTK method; empty for the others."""
    candidates: int
    steps: int
    restarts: int
    total_variation: float
    """Weight of the prior."""
    control_images: int
    control_steps: int
    """At most so many steps of training for the positive control."""
    seed: int

    @property
    def record_every(self) -> int:
        return max(RECORD_EVERY, self.steps // 200)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Plan:
        return built(cls, fields)

    def runs(self, *, controls: bool) -> list[tuple[str, int]]:
        """(role, number) of every reconstruction, those without which there is no verdict first."""
        two = list(range(CONTROL_RUNS))
        extra = [("subject", r) for r in range(CONTROL_RUNS, self.restarts)]
        roles = ("subject", "negative", "positive") if controls else ("subject", "negative")
        return [(role, r) for role in roles for r in two] + extra


@dataclass(frozen=True)
class Wishes:
    """What a user may decide for themselves; None leaves it to the plan."""

    candidates: int | None = None
    steps: int | None = None
    restarts: int | None = None
    tangents: int | None = None
    total_variation: float | None = None
    samples: int | None = None
    control_steps: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("candidates", 1), ("steps", 1), ("restarts", 2), ("samples", 1), ("control_steps", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InvalidInputError(f"{name} is {value}; give at least {least}")

    @property
    def complete(self) -> bool:
        """Whether nothing is left that the speed of the machine would decide."""
        return None not in (self.steps, self.restarts, self.tangents, self.control_steps)


def draft(found: Preflight, wishes: Wishes, *, seed: int) -> Plan:
    """The plan as far as it does not depend on time."""
    samples = wishes.samples or found.samples
    likely = samples or found.bound
    candidates = USUAL_CANDIDATES if not likely else min(max(2 * likely, FEWEST_CANDIDATES), MOST_CANDIDATES)
    candidates = wishes.candidates or candidates
    return Plan(
        method=found.method,
        at=NODES[1] if found.method == "ntk" else (),
        candidates=candidates,
        steps=ENOUGH,
        restarts=3,
        total_variation=0.1 if wishes.total_variation is None else wishes.total_variation,
        control_images=min(samples or max(1, candidates // 2), candidates, MOST_PUBLIC),
        control_steps=MOST_TRAINING,
        seed=seed,
    )


def fulfilled(plan: Plan, wishes: Wishes) -> Plan:
    """The plan as wished, whatever time it takes."""
    assert wishes.complete
    at = NODES[wishes.tangents] if plan.at and wishes.tangents else plan.at
    asked = {name: getattr(wishes, name) for name in ("steps", "restarts", "control_steps")}
    return replace(plan, at=at, **asked)


def fitted(plan: Plan, wishes: Wishes, *, seconds: float, rate: float, training_rate: float, controls: bool) -> Plan:
    """The plan with tangent points, steps and restarts for so many seconds, at so many steps a second at one node.

    Two tangent points see more than one at twice the cost, so they come first once steps are enough; then more steps;
    then more restarts.
    """
    counted = MARGIN * seconds
    training = wishes.control_steps or min(MOST_TRAINING, max(LEAST, int(TRAINING_SHARE * counted * training_rate)))
    left = counted - training / training_rate if controls else counted

    def affordable(restarts: int, nodes: int) -> int:
        runs = restarts + CONTROL_RUNS * (2 if controls else 1)
        return int(left * rate / (runs * nodes))

    restarts = wishes.restarts or 3
    nodes = (wishes.tangents or (2 if affordable(restarts, 2) >= ENOUGH else 1)) if plan.at else 1
    if wishes.restarts is None:
        restarts = 2 if affordable(3, nodes) < ENOUGH // 2 else 3
        while restarts < MOST_RESTARTS and affordable(restarts + 1, nodes) >= PLENTY:
            restarts += 1
    steps = wishes.steps or _round_down(min(max(affordable(restarts, nodes), LEAST), PLENTY))
    at = NODES[nodes] if plan.at else ()
    return replace(plan, at=at, restarts=restarts, steps=steps, control_steps=training)


def _round_down(steps: int) -> int:
    """To two digits: no plan hangs on the last per cent of a measured speed."""
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return steps // unit * unit


def measured_rate(
    objective: Objective, image_shape: tuple[int, ...], candidates: int, *, seconds: float = 1.5
) -> float:
    """Steps of a reconstruction a second."""
    mode = Execution().resolved(objective.device, PLENTY)  # that of a run as long as the longest that is planned
    settings = Settings(candidates=candidates, steps=10**6, record_every=RECORD_EVERY)
    solver = Solver(objective, Everywhere(image_shape), settings, Execution(mode=mode))
    with solver.execution.matrix_precision(objective.device):
        state = solver.step(solver.init())  # the first steps pay for what later ones find ready
        began, first = time.monotonic(), state.step
        while state.step == first or time.monotonic() - began < seconds:
            state = solver.step(state)  # recording waits for the device, so the clock is right
    return (state.step - first) / (time.monotonic() - began)
