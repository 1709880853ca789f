"""Full-batch training to convergence, keeping the start and saying how converged the end is.

Gradient descent with momentum, v ← μv − η∇F(θ), θ ← θ + v. Without weight decay θ − θ_0 is a sum of
gradients, so everything that the theory says about the span of the data holds for these networks.

For a separable loss without weight decay F is log L, not L. Its gradient ∇L/L is, once the
data are separated, a convex combination of the gradients of the margins, so the step keeps its length when
the loss is 10⁻³⁰⁰: training goes on towards the direction of maximum margin instead of standing still.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.functional import logsigmoid, one_hot

from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError, TrainingDivergedError
from palimpsest.execution import Execution, Program, Tensors
from palimpsest.fusion import fusible

LossName = Literal["squared", "logistic", "cross_entropy"]
Record = dict[str, float]
WINDOW = 500  # steps over which the progress under weight decay is looked at
REESTIMATE, SETTLED = 10, 1000  # steps between two looks at the curvature; ten times as many once it has settled
CLOCK = ("step", "stopped", "diverged", "gap", "tolerance", "rate", "steady", "reach")


class Outcome(StrEnum):
    """How training ended."""

    CONVERGED = "converged"
    OUT_OF_STEPS = "ran out of steps"


@dataclass(frozen=True)
class Fit:
    """A trained network, where it started, and how converged it is.

    Args:
        model: the trained network, in evaluation mode.
        initial: its parameters and buffers before training.
        history: records of step, learning_rate, loss, log_loss, gap and, where defined, margin and
            kkt_residual.
        outcome: whether ``gap`` fell below ``tolerance``.
        gap: what convergence is measured by; see `train`.
        tolerance: the gap that counts as converged.
        loss: the mean loss at the end; it may underflow, ``history[-1]["log_loss"]`` does not.
        accuracy: fraction of training images on the right side, NaN for real-valued targets.
        margin: min_i y_i Φ(x_i), or min_i Φ_y(x_i) − max_{j≠y} Φ_j(x_i).
        degree: L with Φ(cθ) = c^L Φ(θ); None for networks that are not homogeneous.
        normalised_margin: margin/‖θ‖^L; None for networks that are not homogeneous.
        kkt_residual: min_{c≥0} ‖θ − c Σ_i λ_i ∇m_i‖/‖θ‖ with the loss's own weights λ_i; 0 at a KKT point of
            the maximum-margin problem, 1 where the data explain nothing of the weights; None for squared
            loss. It need not vanish where units sit on the kink of a ReLU.
    """

    model: nn.Module
    initial: dict[str, Tensor]
    history: list[Record]
    outcome: Outcome
    gap: float
    tolerance: float
    loss: float
    accuracy: float
    margin: float
    degree: float | None
    normalised_margin: float | None
    kkt_residual: float | None

    @property
    def converged(self) -> bool:
        return self.outcome is Outcome.CONVERGED

    @property
    def summary(self) -> str:
        """One sentence on how training ended."""
        steps = int(self.history[-1]["step"])
        end = "converged" if self.converged else "did not converge"
        accuracy = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.0%}"
        gap = f"gap {self.gap:.2g} (asked for {self.tolerance:.2g})"
        return f"Training {end} in {steps} steps: {gap}, loss {self.loss:.2g}{accuracy}."


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    loss: LossName = "squared",
    steps: int = 10_000,
    learning_rate: float | None = None,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    tolerance: float | None = None,
    record_every: int = 50,
    callback: Callable[[Record], object] | None = None,
    execution: Execution | None = None,
) -> Fit:
    """Train a copy of a network on all images at once; the network passed in stays as it is.

    The images are what the network sees: centre them first if it is meant to see centred images. The network
    computes as it does in evaluation mode, so dropout is off and normalisation layers keep their statistics.

    Args:
        model: any network with outputs ``(k,)``, ``(k, 1)`` or ``(k, C)``.
        images: ``(n, …)``, moved to the network's device and precision.
        labels: ±1 for one output, 0…C−1 for C outputs; for squared loss also real targets, one per output.
        loss: mean of (Φ − y)², of log(1 + e^{−yΦ}), or of the cross-entropy of the softmax.
        steps: the most steps to take.
        learning_rate: a constant η; unless given, 1/(2λ) with λ the largest eigenvalue of the Gauss–Newton
            curvature of F, followed during training because it grows with the weights.
        momentum: μ.
        weight_decay: δ in L + ½δ‖θ‖²; the loss is then not replaced by its logarithm.
        tolerance: the gap at which to stop. Squared loss: the largest error |Φ(x_i) − y_i|, 0.01 unless
            given. Separable losses: the KKT residual once all images are on the right side, 0.1 unless given,
            which few networks reach. With weight decay: the fraction by which F fell in the last 500 steps,
            0.001 unless given.
        record_every: steps between two entries of the history.
        callback: called with each entry as it is made.
        execution: how the steps are carried out; by default as fast as the device allows.

    >>> from palimpsest.networks import MLP
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(4, 9), torch.tensor([-1, -1, 1, 1])
    >>> fit = train(MLP(9, hidden=(32,)), x, y)
    >>> fit.outcome.value, fit.accuracy, sorted(fit.initial)
    ('converged', 1.0, ['layers.0.bias', 'layers.0.weight', 'layers.1.weight'])
    """
    _check(loss, steps, learning_rate, momentum, weight_decay, tolerance)
    model = copy.deepcopy(model).eval()
    initial = {name: value.detach().clone() for name, value in model.state_dict().items()}
    problem = _Problem(model, images, labels, loss, weight_decay)
    tolerance = problem.default_tolerance if tolerance is None else tolerance
    descent = _Descent(problem, steps, learning_rate, momentum, tolerance)
    how = execution or Execution(tf32=False)  # margins of hundreds need more than TF32's three digits
    likely = steps // 10  # most trainings converge long before their limit
    if how.mode == "auto" and problem.images.device.type == "cpu":
        how = replace(how, mode="eager")  # and most on a CPU before compiling has paid
    executor = how.executor(descent.programs, problem.images.device, often=["step"], steps=likely)
    history: list[Record] = []

    def record(entry: Tensors) -> None:
        history.append({name: value for name, value in _numbers(entry).items() if value is not None})
        history[-1]["step"] = int(history[-1]["step"])
        if callback:
            callback(history[-1])

    with how.numbers(problem.images.device):
        tensors, step, stopped = descent.start(), 0, False
        while not stopped:
            tensors, seen = executor.run(tensors, descent.plan(step, record_every))
            status = [tensors[name].long() for name in ("step", "diverged", "stopped")]
            step, diverged, stopped = torch.stack(status).tolist()
            if diverged >= 0:
                raise TrainingDivergedError(diverged, "lower the learning rate, or leave it out to have it chosen")
            for entry in seen:
                if not stopped or int(entry["step"]) < step:  # the last step is recorded below
                    record(entry)
        record(descent.look(tensors))
        return problem.fit(tensors, initial, history, tolerance)


class _Descent:
    """Gradient descent with momentum as programs for an executor: nothing is read back while they run.

    Once training is over, further steps leave everything as it is; so it does not matter how many were asked for.
    """

    def __init__(
        self, problem: _Problem, steps: int, learning_rate: float | None, momentum: float, tolerance: float
    ) -> None:
        self.problem, self.steps, self.learning_rate = problem, steps, learning_rate
        self.momentum, self.tolerance = momentum, tolerance
        self.programs: dict[str, Program] = {
            "estimate": partial(self._estimate, iterations=2),
            "step": self._step,
            "watched step": partial(self._step, watch=True),
        }

    def start(self) -> Tensors:
        θ, like = self.problem.named, self.problem.images
        rate, reach = self.learning_rate or 0.0, self.problem.stride * (1 - self.momentum)
        numbers = {"rate": rate, "steady": rate, "gap": math.inf, "reach": reach}
        numbers |= {"tolerance": self.tolerance, "momentum": self.momentum}
        tensors = {f"θ/{name}": p.detach().clone() for name, p in θ.items()}
        tensors |= {f"v/{name}": torch.zeros_like(p) for name, p in θ.items()}
        tensors |= {name: torch.tensor(value).to(like) for name, value in numbers.items()}
        tensors |= {name: torch.tensor(value, device=like.device) for name, value in (("step", 0), ("diverged", -1))}
        tensors["stopped"] = torch.tensor(False, device=like.device)
        tensors["direction"] = self.problem.start_of_iteration()
        if self.problem.decay:
            tensors["past"] = torch.full((WINDOW + 1,), math.nan).to(like)
        self._estimate(tensors, None, iterations=20)
        return tensors

    def plan(self, step: int, record_every: int) -> list[str]:
        """The programs of the next steps, a look at the curvature before every tenth; many where asking is dear."""
        plan = []
        for s in range(step, step + REESTIMATE * (20 if self.problem.images.is_cuda else 1)):
            every = REESTIMATE if s < SETTLED else 10 * REESTIMATE
            if s % every == 0 and s > 0 and self.learning_rate is None:
                plan.append("estimate")
            plan.append("watched step" if s % record_every == 0 else "step")
        return plan

    def look(self, tensors: Tensors) -> Tensors:
        """What there is to say of the present point."""
        return self._entry(tensors, self.problem.evaluate(_part(tensors, "θ")))

    def _estimate(self, tensors: Tensors, _: Tensor | None, *, iterations: int) -> None:
        if self.learning_rate is None:
            λ, direction = self.problem.curvature(_part(tensors, "θ"), tensors["direction"], iterations)
            tensors["direction"].copy_(direction)
            tensors["steady"].copy_(0.5 / λ)

    def _step(self, tensors: Tensors, _: Tensor, *, watch: bool = False) -> Tensors | None:
        θ, v = _part(tensors, "θ"), _part(tensors, "v")
        state = self.problem.evaluate(θ)
        clock, gap = {name: tensors[name] for name in CLOCK}, self._gap(tensors, state)
        moving, set_to = _decide(clock, state.numbers, gap, self.steps, self.learning_rate is None)
        for name, value in set_to.items():
            tensors[name].copy_(value)
        entry = self._entry(tensors, state) if watch else None
        pace = (tensors["momentum"], tensors["rate"], moving)
        _move(list(θ.values()), list(v.values()), list(state.gradient), *pace)
        tensors["step"].add_(moving)
        return entry

    def _gap(self, tensors: Tensors, state: _State) -> Tensor:
        """The gap of this point; under weight decay, by what fraction F has fallen in the last 500 steps.

        The norm of the gradient would not do: ReLU networks with weight decay end on kinks, where it jumps.
        """
        if not self.problem.decay:
            return state.numbers.gap
        F, past, step = state.numbers.value, tensors["past"], tensors["step"]
        past.index_copy_(0, (step % len(past))[None], F[None])
        oldest = past[((step + 1) % len(past))[None]][0]  # NaN before the window is full
        return torch.where(oldest.isnan(), torch.ones_like(F), (1 - F / oldest).abs())

    def _entry(self, tensors: Tensors, state: _State) -> Tensors:
        entry = {name: tensors[name].clone() for name in ("step", "rate", "gap")}
        return entry | {name: getattr(state.numbers, name) for name in ("log_loss", "margin", "kkt_residual")}


@fusible
def _decide(clock: Tensors, numbers: _Numbers, gap: Tensor, steps: int, chosen: bool) -> tuple[Tensor, Tensors]:
    """Whether to move, and the clock set: the gap, the rate, and whether training is over or has failed."""
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


def _part(tensors: Tensors, of: str) -> Tensors:
    return {name.removeprefix(f"{of}/"): t for name, t in tensors.items() if name.startswith(f"{of}/")}


def _numbers(entry: Tensors) -> dict[str, float | None]:
    """One entry of the history: read from the device at once."""
    values = dict(zip(entry, torch.stack([t.double() for t in entry.values()]).tolist(), strict=True))
    record: dict[str, float | None] = {"step": values["step"], "learning_rate": values["rate"]}
    record |= {"loss": math.exp(min(values["log_loss"], 700.0)), "log_loss": values["log_loss"], "gap": values["gap"]}
    return record | {name: None if math.isnan(values[name]) else values[name] for name in ("margin", "kkt_residual")}


def _check(loss: str, steps: int, rate: float | None, momentum: float, decay: float, tolerance: float | None) -> None:
    if loss not in ("squared", "logistic", "cross_entropy"):
        raise InvalidInputError(f"loss is {loss!r}; choose 'squared', 'logistic' or 'cross_entropy'")
    if steps < 1 or not 0 <= momentum < 1 or not 0 <= decay < math.inf:
        raise InvalidInputError("steps must be positive, momentum in [0, 1), weight_decay at least 0")
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidInputError(f"learning_rate is {rate}; give a positive number or leave it out")
    if tolerance is not None and not tolerance > 0:
        raise InvalidInputError(f"tolerance is {tolerance}; give a positive number or leave it out")


class _Numbers(NamedTuple):
    """What there is to know of one θ, as tensors on the device."""

    value: Tensor
    """F."""
    log_loss: Tensor
    gap: Tensor
    margin: Tensor
    kkt_residual: Tensor
    """NaN for squared loss."""
    norm: Tensor
    """‖θ‖."""
    gradient_norm: Tensor
    """‖∇F‖."""


@dataclass(frozen=True)
class _State:
    numbers: _Numbers
    gradient: tuple[Tensor, ...]


class _Problem:
    """The function F that training minimises: its value, gradient and curvature at any θ."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, loss: LossName, decay: float) -> None:
        self.model, self.loss, self.decay = model, loss, decay
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise NoGradientError("the network has no parameter to train; let some require a gradient")
        self.images = images.to(next(iter(self.named.values())))
        if not torch.isfinite(self.images).all():
            raise NonFiniteError("the images contain NaN or infinity; remove those images")
        with torch.no_grad():
            outputs = _matrix(model(self.images), len(images))
        self.labels = labels.to(outputs.device)
        self.targets = _targets(self.labels, outputs, loss)
        self.has_margin = (
            not self.labels.dtype.is_floating_point if outputs.shape[1] > 1 else bool((self.targets.abs() == 1).all())
        )
        self._fitted_shape = outputs.shape if loss == "squared" else outputs.shape[:1]

    def start_of_iteration(self) -> Tensor:
        """A direction from which to look for the largest curvature."""
        return torch.randn(self._fitted_shape, generator=torch.Generator().manual_seed(0)).to(self.images)

    @property
    def stride(self) -> float:
        """By what fraction of ‖θ‖ a step of chosen length may move θ.

        Short for squared loss: overshooting moves the weights in ways that no image explains. Longer towards
        the maximum margin, where the weights have to grow many times over, and where weight decay will have
        the weights forget their way.
        """
        return 0.00025 if self.loss == "squared" and not self.decay else 0.02

    @property
    def default_tolerance(self) -> float:
        return 0.001 if self.decay else 0.01 if self.loss == "squared" else 0.1

    def fitted(self, outputs: Tensor) -> Tensor:
        """What the loss is a function of: the outputs Φ for squared loss, otherwise the margins m."""
        return outputs if self.loss == "squared" else _margins(outputs, self.targets)

    def outputs(self, θ: Mapping[str, Tensor]) -> Tensor:
        return _matrix(functional_call(self.model, dict(θ), (self.images,)), len(self.images))

    def evaluate(self, θ: Mapping[str, Tensor]) -> _State:
        """F and ∇F: the loss is differentiated by hand in the outputs, the network by autograd."""
        leaves = {name: p.detach().requires_grad_() for name, p in θ.items()}
        with torch.enable_grad():
            outputs = self.outputs(leaves)
        loss = _squared if self.loss == "squared" else _separable
        value, log_loss, gap, margin, pull = loss(outputs.detach(), self.targets, bool(self.decay), self.has_margin)
        parameters = list(leaves.values())
        gradient = torch.autograd.grad(outputs, parameters, pull, allow_unused=True, materialize_grads=True)
        numbers = (value, log_loss, gap, margin)
        return _State(*_with_geometry(numbers, parameters, gradient, self.decay, self.loss != "squared"))

    def curvature(self, θ: Mapping[str, Tensor], direction: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue of JᵀDJ (+ δ), by power iteration, and the direction from which to go on next time.

        J is the Jacobian in θ of the outputs or margins. D is 2/n for squared loss, σ(m)σ(−m)/n for a
        separable one, and for its logarithm the p_i = σ(−m_i)/Σ_j ℓ_j of ∇F = −Σ_i p_i ∇m_i. That bounds the
        curvature of log L and is at least about ‖∇F‖², so no step is long because one image dominates and F
        looks straight.
        """

        def function(θ: dict[str, Tensor]) -> Tensor:
            return self.fitted(self.outputs(θ))

        point = {name: p.detach() for name, p in θ.items()}
        fitted, pull = vjp(function, point)[:2]
        D = self._weights(fitted).sqrt()
        u, λ = direction, direction.new_zeros(())
        for _ in range(iterations):
            u = u / u.norm().clamp_min(_tiny(u))
            (v,) = pull(D * u)
            u = D * jvp(function, (point,), (v,))[1]
            λ = u.norm()
        # A little of every direction is kept, so that one which has become the steepest is found next time.
        onwards = u / λ.clamp_min(_tiny(u)) + 0.01 / math.sqrt(u.numel())
        return λ.clamp_min(1e-30) + self.decay, onwards.detach()

    def _weights(self, fitted: Tensor) -> Tensor:
        if self.loss == "squared":
            return torch.full_like(fitted, 2 / len(fitted))
        if self.decay:
            return torch.sigmoid(fitted) * torch.sigmoid(-fitted) / len(fitted)
        return _shares(fitted)

    def accuracy(self, outputs: Tensor) -> float:
        if not self.has_margin:
            return math.nan
        if outputs.shape[1] > 1:
            return float((outputs.argmax(1) == self.labels).double().mean())
        return float((outputs * self.targets > 0).double().mean())

    @torch.no_grad()
    def fit(self, tensors: Tensors, initial: dict[str, Tensor], history: list[Record], tolerance: float) -> Fit:
        """The result: the network with its final weights, described by the last entry of the history."""
        for name, p in self.named.items():
            p.copy_(tensors[f"θ/{name}"])
        outputs, last = self.outputs(self.named), history[-1]
        degree, margin = self.degree(outputs), last.get("margin", math.nan)
        norm = math.hypot(*(float(torch.linalg.vector_norm(p)) for p in self.named.values()))
        return Fit(
            model=self.model,
            initial=initial,
            history=history,
            outcome=Outcome.CONVERGED if last["gap"] <= tolerance else Outcome.OUT_OF_STEPS,
            gap=last["gap"],
            tolerance=tolerance,
            loss=last["loss"],
            accuracy=self.accuracy(outputs),
            margin=margin,
            degree=degree,
            normalised_margin=None if degree is None else margin / norm**degree,
            kkt_residual=last.get("kkt_residual"),
        )

    def degree(self, outputs: Tensor) -> float | None:
        """L with Φ(2θ) = 2^L Φ(θ) for every image, to three digits; None if there is no such L."""
        twice = self.outputs({name: 2 * p for name, p in self.named.items()})
        scale = float((twice * outputs).sum() / (outputs**2).sum().clamp_min(_tiny(outputs)))
        same = bool(torch.allclose(twice, scale * outputs, rtol=1e-3, atol=1e-3 * float(twice.abs().max())))
        return round(math.log2(scale), 2) if same and scale > 0 else None


def _matrix(outputs: Tensor, n: int) -> Tensor:
    """Outputs as (n, C), whether the network gives (n,), (n, 1) or (n, C)."""
    if outputs.ndim > 2 or outputs.shape[:1] != (n,):
        raise InvalidInputError(f"the network gives outputs of shape {tuple(outputs.shape)} for {n} images;"
                                " it must give (k,), (k, 1) or (k, C)")  # fmt: skip
    return outputs.reshape(n, -1)


def _targets(labels: Tensor, outputs: Tensor, loss: LossName) -> Tensor:
    """What the outputs are compared with, after checking that labels, outputs and loss fit together."""
    n, C = outputs.shape
    if loss == "squared" and labels.dtype.is_floating_point and labels.numel() == outputs.numel():
        return labels.to(outputs).reshape(n, C)
    if labels.shape != (n,):
        raise InvalidInputError(f"labels have shape {tuple(labels.shape)}; give one for each of {n} images")
    if C == 1 and loss != "cross_entropy":
        if not bool((labels.abs() == 1).all()):
            raise InvalidInputError("a network with one output needs labels −1 and 1")
        return labels.to(outputs).reshape(n, 1)
    if loss == "logistic" or C == 1:
        raise InvalidInputError(f"{loss} loss does not fit {C} output(s); logistic takes 1, cross_entropy more")
    if labels.dtype.is_floating_point or not bool(((labels >= 0) & (labels < C)).all()):
        raise InvalidInputError(f"a network with {C} outputs needs whole labels 0…{C - 1}")
    return one_hot(labels.long(), C).to(outputs)


# --- losses, as functions of the outputs ------------------------------------------------------------
# Each gives F (or its part without weight decay), log L, the gap, the least margin, and ∂F/∂Φ.

Judged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@fusible
def _squared(Φ: Tensor, y: Tensor, decay: bool, has_margin: bool) -> Judged:
    """L = mean_i ‖Φ(x_i) − y_i‖²; the gap is the largest error."""
    error = Φ - y
    L = error.square().sum(1).mean()
    return L, L.clamp_min(_tiny(L)).log(), error.abs().max(), _least_margin(Φ, y, has_margin), 2 * error / len(Φ)


@fusible
def _separable(Φ: Tensor, y: Tensor, decay: bool, has_margin: bool) -> Judged:
    """F = log mean_i log(1 + e^{−m_i}), or without the outer logarithm under weight decay; the gap is set later."""
    m = _margins(Φ, y)
    log_loss = _log_losses(m).logsumexp(0) - math.log(len(m))
    p = torch.sigmoid(-m) / len(m) if decay else _shares(m)  # −∂F/∂m
    if y.shape[1] == 1:
        pull = -p[:, None] * y
    else:
        others = torch.softmax(Φ.masked_fill(y > 0, -math.inf), 1)
        pull = -p[:, None] * (y - others)
    return log_loss.exp() if decay else log_loss, log_loss, log_loss, _least_margin(Φ, y, has_margin), pull


def _margins(Φ: Tensor, y: Tensor) -> Tensor:
    """m of the loss log(1 + e^{−m}): yΦ for one output, Φ_y − log Σ_{j≠y} e^{Φ_j} for several, y one-hot."""
    if y.shape[1] == 1:
        return (Φ * y)[:, 0]
    return (Φ * y).sum(1) - Φ.masked_fill(y > 0, -math.inf).logsumexp(1)


def _log_losses(m: Tensor) -> Tensor:
    """log log(1 + e^{−m}) for each margin, also where log(1 + e^{−m}) underflows: there it is −m."""
    far = m > 30
    return torch.where(far, -m, torch.log(-logsigmoid(m.masked_fill(far, 0.0))))


def _shares(m: Tensor) -> Tensor:
    """p_i = σ(−m_i) / Σ_j ℓ_j of ∇ log L = −Σ_i p_i ∇m_i."""
    return torch.exp(logsigmoid(-m) - _log_losses(m).logsumexp(0))


def _least_margin(Φ: Tensor, y: Tensor, defined: bool) -> Tensor:
    """min_i of y_i Φ(x_i), or of Φ_y(x_i) − max_{j≠y} Φ_j(x_i); NaN where labels are real targets."""
    if not defined:
        return torch.full_like(Φ[0, 0], math.nan)
    if y.shape[1] == 1:
        return (Φ * y).min()
    return ((Φ * y).sum(1) - Φ.masked_fill(y > 0, -math.inf).amax(1)).min()


def _tiny(x: Tensor) -> float:
    """The least positive number of a tensor's precision, against division by zero."""
    return torch.finfo(x.dtype).tiny


@fusible
def _with_geometry(
    judged: tuple[Tensor, Tensor, Tensor, Tensor],
    θ: Sequence[Tensor],
    gradient: Sequence[Tensor],
    decay: float,
    separable: bool,
) -> tuple[_Numbers, tuple[Tensor, ...]]:
    """The judgement completed by what the whole of θ and of the gradient say, and the gradient with weight decay.

    The KKT residual min_{c≥0} ‖θ + c∇L‖/‖θ‖ is the sine of the angle between θ and −∇L = Σ λ_i ∇m_i, 1 if it is
    obtuse; it is the gap of a separable loss once all images are on the right side.
    """
    value, log_loss, gap, margin = judged
    θ = [p.detach() for p in θ]
    norm, gradient_norm, inner = (
        torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
        for left, right in ((θ, θ), (gradient, gradient), (θ, gradient))
    )
    norm, gradient_norm = norm.sqrt(), gradient_norm.sqrt()
    kkt = torch.full_like(value, math.nan)
    if separable:
        cosine = -inner / (norm * gradient_norm).clamp_min(_tiny(norm))
        kkt = (1 - cosine.clamp_min(0.0) ** 2).clamp_min(0.0).sqrt()
        gap = torch.where(margin > 0, kkt, torch.ones_like(kkt))
    if decay:
        value = value + 0.5 * decay * norm**2
        gradient_norm = (gradient_norm**2 + 2 * decay * inner + (decay * norm) ** 2).clamp_min(0).sqrt()
        gradient = [g + decay * p for g, p in zip(gradient, θ, strict=True)]
    return _Numbers(value, log_loss, gap, margin, kkt, norm, gradient_norm), tuple(gradient)
