"""Gradient descent with momentum, v ← μv − η∇F(θ), θ ← θ + v, and when it stops."""

import math
from functools import partial

import torch
from torch import Tensor

from palimpsest.execution import Program, Tensors
from palimpsest.execution.fusion import fusible
from palimpsest.training.problem import Evaluation, Numbers, TrainingProblem

WINDOW = 500  # steps over which progress under weight decay is measured
REESTIMATE, SETTLED = 10, 1000  # steps between two estimates of the curvature; ten times as many once it has settled
CLOCK = ("step", "stopped", "diverged", "gap", "tolerance", "rate", "steady", "reach")


class Descent:
    """Gradient descent with momentum as programs for an executor, which do not read values back from the device.

    Once training is over, further steps do not change anything, so a plan may contain too many.
    """

    def __init__(
        self, problem: TrainingProblem, steps: int, learning_rate: float | None, momentum: float, tolerance: float
    ) -> None:
        self.problem, self.steps, self.learning_rate = problem, steps, learning_rate
        self.momentum, self.tolerance = momentum, tolerance
        self.programs: dict[str, Program] = {
            "estimate": partial(self._estimate, iterations=2),
            "step": self._step,
            "watched step": partial(self._step, watch=True),
        }

    def start(self) -> Tensors:
        θ, like = self.problem.start, self.problem.images
        rate, reach = self.learning_rate or 0.0, self.problem.stride * (1 - self.momentum)
        numbers = {"rate": rate, "steady": rate, "gap": math.inf, "reach": reach}
        numbers |= {"tolerance": self.tolerance, "momentum": self.momentum}
        tensors = {f"θ/{name}": p.clone() for name, p in θ.items()}
        tensors |= {f"v/{name}": torch.zeros_like(p) for name, p in θ.items()}
        tensors |= {name: torch.tensor(value, dtype=torch.float64).to(like) for name, value in numbers.items()}
        tensors |= {name: torch.tensor(value, device=like.device) for name, value in (("step", 0), ("diverged", -1))}
        tensors["stopped"] = torch.tensor(False, device=like.device)
        tensors["direction"] = self.problem.start_of_iteration()
        if self.problem.decay:
            tensors["past"] = torch.full((WINDOW + 1,), math.nan).to(like)
        self._estimate(tensors, None, iterations=20)
        return tensors

    def plan(self, step: int, record_every: int) -> list[str]:
        """The programs of the next steps, with an estimate of the curvature before every tenth. On CUDA, many steps."""
        plan = []
        for s in range(step, step + REESTIMATE * (20 if self.problem.images.is_cuda else 1)):
            every = REESTIMATE if s < SETTLED else 10 * REESTIMATE
            if s % every == 0 and s > 0 and self.learning_rate is None:
                plan.append("estimate")
            plan.append("watched step" if s % record_every == 0 else "step")
        return plan

    def look(self, tensors: Tensors) -> Tensors:
        """The record of the present point."""
        return self._entry(tensors, self.problem.evaluate(part(tensors, "θ")))

    def _estimate(self, tensors: Tensors, _: Tensor | None, *, iterations: int) -> None:
        if self.learning_rate is None:
            λ, direction = self.problem.curvature(part(tensors, "θ"), tensors["direction"], iterations)
            tensors["direction"].copy_(direction)
            tensors["steady"].copy_(0.5 / λ)

    def _step(self, tensors: Tensors, _: Tensor, *, watch: bool = False) -> Tensors | None:
        θ, v = part(tensors, "θ"), part(tensors, "v")
        state = self.problem.evaluate(θ)
        clock, gap = {name: tensors[name] for name in CLOCK}, self._gap(tensors, state)
        moving, set_to = _decide(clock, state.numbers, gap, self.steps, self.learning_rate is None)
        for name, value in set_to.items():
            tensors[name].copy_(value)
        entry = self._entry(tensors, state) if watch else None
        momentum, rate = tensors["momentum"], tensors["rate"]
        _move(list(θ.values()), list(v.values()), list(state.gradient), momentum, rate, moving)
        tensors["step"].add_(moving)
        return entry

    def _gap(self, tensors: Tensors, state: Evaluation) -> Tensor:
        """The gap of this point; under weight decay, the fraction by which F fell in the last 500 steps.

        The gradient is no measure there: ReLU networks with weight decay end on kinks, where it jumps.
        """
        if not self.problem.decay:
            return state.numbers.gap
        F, past, step = state.numbers.value, tensors["past"], tensors["step"]
        past.index_copy_(0, (step % len(past))[None], F[None])
        oldest = past[((step + 1) % len(past))[None]][0]  # NaN before the window is full
        return torch.where(oldest.isnan(), torch.ones_like(F), (1 - F / oldest).abs())

    def _entry(self, tensors: Tensors, state: Evaluation) -> Tensors:
        entry = {name: tensors[name].clone() for name in ("step", "rate", "gap")}
        return entry | {name: getattr(state.numbers, name) for name in ("log_loss", "margin", "kkt_residual")}


@fusible
def _decide(clock: Tensors, numbers: Numbers, gap: Tensor, steps: int, chosen: bool) -> tuple[Tensor, Tensors]:
    """Whether to move, and the new clock: the gap, the rate, and whether training is over or has diverged."""
    step, stopped, diverged = clock["step"], clock["stopped"], clock["diverged"]
    over = (gap <= clock["tolerance"]) | (step >= steps)
    longest = clock["reach"] * numbers.norm / numbers.gradient_norm.clamp_min(1e-30)
    moving = ~(stopped | over)
    return moving, {
        "diverged": torch.where((diverged < 0) & ~numbers.value.isfinite(), step, diverged),
        "gap": torch.where(stopped, clock["gap"], gap),
        "stopped": stopped | over,
        "rate": torch.minimum(clock["steady"], longest) if chosen else clock["steady"].clone(),
    }


@fusible
def _move(
    θ: list[Tensor], v: list[Tensor], gradient: list[Tensor], momentum: Tensor, rate: Tensor, moving: Tensor
) -> None:
    """v ← μv − η∇F, θ ← θ + v, in place, unless training is over."""
    for p, velocity, g in zip(θ, v, gradient, strict=True):
        velocity.mul_(momentum).sub_(rate * g)
        p.add_(velocity * moving)


def part(tensors: Tensors, of: str) -> Tensors:
    return {name.removeprefix(f"{of}/"): t for name, t in tensors.items() if name.startswith(f"{of}/")}
