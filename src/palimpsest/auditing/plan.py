"""The plan of an audit: made once, from the preflight, the options and the time, and then followed.

A resumed audit follows the same plan to the same result, even on a busier machine.
"""

import math
from dataclasses import dataclass, replace

from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import Preflight
from palimpsest.runs.problems import Method, Within

NODES = {1: (0.5,), 2: (0.15, 0.85)}  # tangent points of NTK, and of Path on each segment
FEWEST_CANDIDATES, USUAL_CANDIDATES, MOST_CANDIDATES = 10, 80, 400
FEWEST_STEPS, ENOUGH_STEPS, MOST_STEPS = 100, 1500, 4000  # of a reconstruction
ENOUGH_IN_SPAN = 800  # the span has fewer dimensions; there two tangent points read more from about here on
CONTROL_RUNS = 2  # of each control: agreement takes two
USUAL_RESTARTS, MOST_RESTARTS = 3, 6
MOST_PUBLIC_IMAGES = 400  # of the positive control; there are not many more
MOST_TRAINING_STEPS = 10_000
MARGIN = 0.8  # share of the measured speed that the plan relies on, because machines are shared
TRAINING_SHARE = 0.15  # share of the time for training the positive control
RECORD_EVERY = 5  # steps at least: recording costs time, and the measured speed must hold for short runs too


@dataclass(frozen=True)
class Plan:
    """Every choice of an audit. A choice of the user replaces the one that the audit would make."""

    method: Method
    within: Within
    at: tuple[float, ...]  # tangent points of NTK and Path; empty for the others
    candidates: int
    steps: int
    restarts: int
    total_variation: float  # weight of the prior
    control_images: int
    control_steps: int  # maximum number of training steps for the positive control
    seed: int

    @property
    def record_every(self) -> int:
        return max(RECORD_EVERY, self.steps // 200)

    def runs(self, *, controls: bool) -> list[tuple[str, int]]:
        """(role, number) of every reconstruction. Those that a verdict needs come first."""
        roles = ("subject", "negative", "positive") if controls else ("subject", "negative")
        extra = [("subject", number) for number in range(CONTROL_RUNS, self.restarts)]
        return [(role, number) for role in roles for number in range(CONTROL_RUNS)] + extra


@dataclass(frozen=True)
class Budget:
    """The time for an audit, and the speed of the machine."""

    seconds: float  # the time left
    rate: float  # steps of a reconstruction per second, with one tangent point
    training_rate: float  # training steps of the positive control per second


def untimed_plan(attacker: Attacker, found: Preflight, options: Options) -> Plan:
    """The plan for a rung, as far as it does not depend on time."""
    n = attacker.samples
    likely, fewest = (n, FEWEST_CANDIDATES) if n else (found.bound or 0, USUAL_CANDIDATES)
    candidates = options.candidates or min(max(2 * likely, fewest), MOST_CANDIDATES)
    assert attacker.method is not None
    return Plan(
        method=attacker.method,
        within="everywhere" if attacker.directions is None else "span",
        at=NODES[1] if attacker.method in ("ntk", "path") else (),
        candidates=candidates,
        steps=ENOUGH_STEPS,
        restarts=USUAL_RESTARTS,
        total_variation=0.1 if options.total_variation is None else options.total_variation,
        control_images=min(n or max(1, candidates // 2), candidates, MOST_PUBLIC_IMAGES),
        control_steps=MOST_TRAINING_STEPS,
        seed=options.seed,
    )


def timed_plan(plan: Plan, options: Options, budget: Budget) -> Plan:
    """The plan with the tangent points, steps and restarts that the budget allows.

    Two tangent points recover more than one at twice the cost. So they come first once the steps are enough, then more
    steps, then more restarts.
    """
    seconds, training = MARGIN * budget.seconds, options.control_steps
    if training is None:
        affordable_training = int(TRAINING_SHARE * seconds * budget.training_rate)
        training = min(MOST_TRAINING_STEPS, max(FEWEST_STEPS, affordable_training))
    left = seconds - training / budget.training_rate if options.controls else seconds

    def affordable(restarts: int, nodes: int) -> int:
        runs = restarts + CONTROL_RUNS * (2 if options.controls else 1)
        return int(left * budget.rate / (runs * nodes))

    restarts, nodes = options.restarts or USUAL_RESTARTS, 1
    if plan.at:
        enough = ENOUGH_IN_SPAN if plan.within == "span" else ENOUGH_STEPS
        nodes = options.tangents or (2 if affordable(restarts, 2) >= enough else 1)
    if options.restarts is None:
        restarts = 2 if affordable(USUAL_RESTARTS, nodes) < ENOUGH_STEPS // 2 else USUAL_RESTARTS
        while restarts < MOST_RESTARTS and affordable(restarts + 1, nodes) >= MOST_STEPS:
            restarts += 1
    steps = options.steps or _two_digits(min(max(affordable(restarts, nodes), FEWEST_STEPS), MOST_STEPS))
    return replace(plan, at=NODES[nodes] if plan.at else (), restarts=restarts, steps=steps, control_steps=training)


def _two_digits(steps: int) -> int:
    """Rounded down: a plan should not depend on the last per cent of a measured speed."""
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return steps // unit * unit
