"""The plan of a rung: made once, from the preflight, the options and the time, and then followed.

A resumed audit follows the same plan to the same result, even on a busier machine. A plan holds the reconstructions
that a verdict needs. Further restarts use the time that it leaves (see further.py).
"""

import math
from dataclasses import dataclass, replace

from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import Preflight
from palimpsest.methods.adam import STAGES
from palimpsest.runs.problems import CHANGES, Method, Rule, Within

NODES: dict[tuple[str, str], dict[int, tuple[float, ...]]] = {  # tangent points of a whole training, or of a segment
    ("ntk", "sgd"): {1: (0.5,), 2: (0.15, 0.85)},
    ("path", "sgd"): {1: (0.5,), 2: (0.15, 0.85)},
    ("ntk", "adam"): {1: (0.17, 0.5, 0.83), 2: STAGES},
    ("path", "adam"): {1: (0.5,), 2: (0.25, 0.75)},
}
FEWEST_CANDIDATES, USUAL_CANDIDATES, MOST_CANDIDATES = 10, 80, 400
FEWEST_STEPS, ENOUGH_STEPS, MOST_STEPS = 100, 1500, 4000  # of a reconstruction
ENOUGH_IN_SPAN = 800  # the span has fewer dimensions; there two tangent points read more from about here on
NEEDED_RUNS = 2  # of the network and of each control: agreement takes two
MOST_PUBLIC_IMAGES = 400  # of the positive control; there are not many more
MOST_TRAINING_STEPS = 10_000
SMOOTHNESS = 0.1  # weight of total variation
WHITENED = 0.85  # strength, for the changes of convolutional networks, whose images then need more smoothness:
SMOOTHER, FEW_PIXELS = 10.0, 64  # times the usual, at most, and the pixels at which the usual suffices
MARGIN = 0.8  # share of a rung's time that its plan may use, because machines are shared
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
    rule: Rule = "sgd"  # the optimiser of the training
    live: bool = False  # whether candidates are one batch, with live batch normalisation
    whitening: float | None = None  # None: the usual strength of the method
    cosines: bool = False  # whether candidates are searched by cosines (`pal.Cosines`) instead of pixels

    @property
    def nodes(self) -> dict[int, tuple[float, ...]]:
        """The choices of tangent points; empty for methods without them."""
        return NODES.get((self.method, self.rule), {})

    @property
    def searched(self) -> str:
        """Where candidates are searched, in words."""
        if self.within == "span":
            return "the span of the images, which the first layer shows"
        by = " by their cosines" if self.cosines else ""
        return f"all images{by}, with whitened changes of the layers" if self.whitening else f"all images{by}"

    @property
    def record_every(self) -> int:
        return max(RECORD_EVERY, self.steps // 200)

    def runs(self, *, controls: bool) -> list[tuple[str, int]]:
        """(role, number) of every reconstruction. Those that a verdict needs come first."""
        roles = ("subject", "negative", "positive") if controls else ("subject", "negative")
        extra = [("subject", number) for number in range(NEEDED_RUNS, self.restarts)]
        return [(role, number) for role in roles for number in range(NEEDED_RUNS)] + extra


@dataclass(frozen=True)
class Budget:
    """The time for a rung, and the speed of the machine."""

    seconds: float  # the time for its plan
    rate: float  # steps of a reconstruction per second, with one tangent point
    training_rate: float  # training steps of the positive control per second
    preparation: float = 0.0  # seconds that it takes to pose the problem of a role
    floor: float = 0.0  # the number of steps, with one tangent point, that take as long as the floor

    def cost(self, plan: Plan, *, controls: bool) -> float:
        """The seconds that a plan takes at this speed."""
        every, nodes = plan.runs(controls=controls), max(1, len(plan.at))
        training = plan.control_steps / self.training_rate if controls else 0.0
        again = plan.restarts > NEEDED_RUNS  # the subject comes once more, after the controls
        posing = (len({role for role, _ in every}) + again) * self.preparation
        return training + posing + (len(every) * plan.steps + self.floor) * nodes / self.rate


def untimed_plan(attacker: Attacker, found: Preflight, options: Options) -> Plan:
    """The plan for a rung, as far as it does not depend on time."""
    n = attacker.samples
    likely, fewest = (n, FEWEST_CANDIDATES) if n else (found.bound or 0, USUAL_CANDIDATES)
    usual = n if attacker.live and n else max(2 * likely, fewest)  # others would change the statistics of a live batch
    candidates = options.candidates or min(usual, MOST_CANDIDATES)
    assert attacker.method is not None
    within: Within = "everywhere" if attacker.directions is None else "span"
    sums = attacker.method in CHANGES and attacker.rule == "sgd" and not attacker.live
    whitened = found.convolutional and sums and within == "everywhere"
    smoothness = SMOOTHNESS * min(max(found.pixels / FEW_PIXELS, 1.0), SMOOTHER) if whitened else SMOOTHNESS
    return Plan(
        method=attacker.method,
        within=within,
        at=NODES[attacker.method, attacker.rule][1] if attacker.method in ("ntk", "path") else (),
        candidates=candidates,
        steps=ENOUGH_STEPS,
        restarts=NEEDED_RUNS,
        total_variation=smoothness if options.total_variation is None else options.total_variation,
        control_images=min(n or max(1, candidates // 2), candidates, MOST_PUBLIC_IMAGES),
        control_steps=MOST_TRAINING_STEPS,
        seed=options.seed,
        rule=attacker.rule,
        live=attacker.live,
        whitening=WHITENED if whitened else None,
        cosines=whitened,
    )


def timed_plan(plan: Plan, options: Options, budget: Budget) -> Plan:
    """The plan with the tangent points and steps that the budget allows, and never with too few steps.

    More tangent points recover more, at a proportional cost. So they come first once the steps are enough, then more
    steps.
    """
    training = options.control_steps
    if training is None:
        affordable_training = int(TRAINING_SHARE * budget.seconds * budget.training_rate)
        training = min(MOST_TRAINING_STEPS, max(FEWEST_STEPS, affordable_training))
    plan = replace(plan, control_steps=training, restarts=options.restarts or NEEDED_RUNS)

    def affordable(at: tuple[float, ...]) -> int:
        none, one = (budget.cost(replace(plan, at=at, steps=s), controls=options.controls) for s in (0, 1))
        return int((budget.seconds - none) / (one - none))

    at = plan.at
    if plan.nodes:
        enough = ENOUGH_IN_SPAN if plan.within == "span" else ENOUGH_STEPS
        at = plan.nodes[options.tangents or (2 if affordable(plan.nodes[2]) >= enough else 1)]
    return replace(plan, at=at, steps=options.steps or two_digits(min(max(affordable(at), FEWEST_STEPS), MOST_STEPS)))


def two_digits(steps: int) -> int:
    """Rounded down: a plan should not depend on the last per cent of a measured speed."""
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return steps // unit * unit
