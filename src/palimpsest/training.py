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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.functional import logsigmoid, one_hot

from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError, TrainingDivergedError

LossName = Literal["squared", "logistic", "cross_entropy"]
Record = dict[str, float]
WINDOW = 500  # steps over which the progress under weight decay is looked at
REESTIMATE = 10  # steps between two looks at the curvature


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
    velocity = [torch.zeros_like(p) for p in problem.parameters]
    history: list[Record] = []
    rate = steady = learning_rate or 0.0
    for step in range(steps + 1):
        state = problem.evaluate()
        if not math.isfinite(state.value):
            raise TrainingDivergedError(step, "lower the learning rate, or leave it out to have it chosen")
        done = state.gap <= tolerance or step == steps
        if learning_rate is None:
            if step % REESTIMATE == 0:
                steady = 0.5 / problem.curvature(iterations=2 if step else 20)
            reach = problem.stride * (1 - momentum) * _norm(problem.parameters)
            rate = min(steady, reach / max(_norm(state.gradient), 1e-300))
        if done or step % record_every == 0:
            history.append({"step": step, "learning_rate": rate, **state.record()})
            if callback:
                callback(history[-1])
        if done:
            break
        with torch.no_grad():
            for p, v, g in zip(problem.parameters, velocity, state.gradient, strict=True):
                v.mul_(momentum).sub_(g, alpha=rate)
                p.add_(v)
    return problem.fit(state, initial, history, tolerance)


def _check(loss: str, steps: int, rate: float | None, momentum: float, decay: float, tolerance: float | None) -> None:
    if loss not in ("squared", "logistic", "cross_entropy"):
        raise InvalidInputError(f"loss is {loss!r}; choose 'squared', 'logistic' or 'cross_entropy'")
    if steps < 1 or not 0 <= momentum < 1 or not 0 <= decay < math.inf:
        raise InvalidInputError("steps must be positive, momentum in [0, 1), weight_decay at least 0")
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidInputError(f"learning_rate is {rate}; give a positive number or leave it out")
    if tolerance is not None and not tolerance > 0:
        raise InvalidInputError(f"tolerance is {tolerance}; give a positive number or leave it out")


@dataclass(frozen=True)
class _State:
    """F, ∇F and what they say about convergence, at one θ."""

    value: float
    gradient: tuple[Tensor, ...]
    gap: float
    log_loss: float
    margin: float
    kkt_residual: float | None

    def record(self) -> Record:
        record = {"loss": math.exp(min(self.log_loss, 700.0)), "log_loss": self.log_loss, "gap": self.gap}
        if not math.isnan(self.margin):
            record["margin"] = self.margin
        return record if self.kkt_residual is None else {**record, "kkt_residual": self.kkt_residual}


class _Problem:
    """The function F that training minimises: its value, gradient and curvature at the network's θ."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, loss: LossName, decay: float) -> None:
        self.model, self.loss, self.decay = model, loss, decay
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        if not self.parameters:
            raise NoGradientError("the network has no parameter to train; let some require a gradient")
        self.images = images.to(self.parameters[0])
        if not torch.isfinite(self.images).all():
            raise NonFiniteError("the images contain NaN or infinity; remove those images")
        with torch.no_grad():
            outputs = _matrix(model(self.images), len(images))
        self.labels = labels.to(outputs.device)
        self.targets = _targets(self.labels, outputs, loss)
        self._past: deque[float] = deque(maxlen=WINDOW + 1)
        shape = outputs.shape if loss == "squared" else outputs.shape[:1]
        self._direction = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(outputs)

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
        if self.loss == "squared":
            return outputs
        if self.loss == "logistic":
            return (outputs * self.targets)[:, 0]
        return _own(outputs, self.labels) - _others(outputs, self.labels).logsumexp(1)

    def log_losses(self, m: Tensor) -> Tensor:
        """log log(1 + e^{−m}) for each margin, also where log(1 + e^{−m}) underflows: there it is −m."""
        far = m > 30
        return torch.where(far, -m, torch.log(-logsigmoid(m.masked_fill(far, 0.0))))

    def evaluate(self) -> _State:
        outputs = _matrix(self.model(self.images), len(self.images))
        fitted = self.fitted(outputs)
        if self.loss == "squared":
            L = ((fitted - self.targets) ** 2).sum(1).mean()
            value, log_loss = L, L.detach().clamp_min(_tiny(L)).log()
        else:
            value = self.log_losses(fitted).logsumexp(0) - math.log(len(fitted))
            log_loss = value.detach()
            value = value.exp() if self.decay else value
        gradient = torch.autograd.grad(value, self.parameters, allow_unused=True, materialize_grads=True)
        kkt = None if self.loss == "squared" else _unexplained(self.parameters, gradient)
        margin = self.margin(outputs.detach())
        if self.decay:
            gradient = tuple(g + self.decay * p.detach() for g, p in zip(gradient, self.parameters, strict=True))
            gap = self._progress(float(value.detach()) + 0.5 * self.decay * _norm(self.parameters) ** 2)
        elif kkt is None:
            gap = float((fitted.detach() - self.targets).abs().max())
        else:
            gap = kkt if margin > 0 else 1.0
        return _State(float(value.detach()), gradient, gap, float(log_loss), margin, kkt)

    def _progress(self, F: float) -> float:
        """By what fraction F has fallen in the last 500 steps; 1 before that can be said.

        The norm of the gradient would not do: ReLU networks with weight decay end on kinks, where it jumps.
        """
        self._past.append(F)
        return abs(1 - F / self._past[0]) if len(self._past) > WINDOW else 1.0

    def curvature(self, iterations: int) -> float:
        """Largest eigenvalue of JᵀDJ (+ δ), by power iteration from where the last one ended.

        J is the Jacobian in θ of the outputs or margins. D is 2/n for squared loss, σ(m)σ(−m)/n for a
        separable one, and for its logarithm the p_i = σ(−m_i)/Σ_j ℓ_j of ∇F = −Σ_i p_i ∇m_i. That bounds the
        curvature of log L and is at least about ‖∇F‖², so no step is long because one image dominates and F
        looks straight.
        """
        θ = {name: p.detach() for name, p in self.named.items()}

        def function(θ: dict[str, Tensor]) -> Tensor:
            return self.fitted(_matrix(functional_call(self.model, θ, (self.images,)), len(self.images)))

        fitted, pull = vjp(function, θ)[:2]
        D = self._weights(fitted)
        u, λ = self._direction, torch.zeros(())
        for _ in range(iterations):
            u = u / u.norm().clamp_min(_tiny(u))
            (v,) = pull(D.sqrt() * u)
            Jv = jvp(function, (θ,), (v,))[1]
            u = D.sqrt() * Jv
            λ = u.norm()
        # A little of every direction is kept, so that one which has become the steepest is found next time.
        self._direction = u / u.norm().clamp_min(_tiny(u)) + 0.01 / math.sqrt(u.numel())
        return max(float(λ), 1e-30) + self.decay

    def _weights(self, fitted: Tensor) -> Tensor:
        if self.loss == "squared":
            return torch.full_like(fitted, 2 / len(fitted))
        if self.decay:
            return torch.sigmoid(fitted) * torch.sigmoid(-fitted) / len(fitted)
        return torch.exp(logsigmoid(-fitted) - self.log_losses(fitted).logsumexp(0))

    def margin(self, outputs: Tensor) -> float:
        """min_i of y_i Φ(x_i), or of Φ_y(x_i) − max_{j≠y} Φ_j(x_i); NaN where labels are real targets."""
        if outputs.shape[1] > 1:
            if self.labels.dtype.is_floating_point:
                return math.nan
            return float((_own(outputs, self.labels) - _others(outputs, self.labels).amax(1)).min())
        return float((outputs * self.targets).min()) if bool((self.targets.abs() == 1).all()) else math.nan

    def accuracy(self, outputs: Tensor) -> float:
        if math.isnan(self.margin(outputs)):
            return math.nan
        if outputs.shape[1] > 1:
            return float((outputs.argmax(1) == self.labels).double().mean())
        return float((outputs * self.targets > 0).double().mean())

    @torch.no_grad()
    def fit(self, state: _State, initial: dict[str, Tensor], history: list[Record], tolerance: float) -> Fit:
        outputs = _matrix(self.model(self.images), len(self.images))
        degree = self.degree(outputs)
        return Fit(
            model=self.model,
            initial=initial,
            history=history,
            outcome=Outcome.CONVERGED if state.gap <= tolerance else Outcome.OUT_OF_STEPS,
            gap=state.gap,
            tolerance=tolerance,
            loss=history[-1]["loss"],
            accuracy=self.accuracy(outputs),
            margin=state.margin,
            degree=degree,
            normalised_margin=None if degree is None else state.margin / _norm(self.parameters) ** degree,
            kkt_residual=state.kkt_residual,
        )

    def degree(self, outputs: Tensor) -> float | None:
        """L with Φ(2θ) = 2^L Φ(θ) for every image, to three digits; None if there is no such L."""
        twice = functional_call(self.model, {name: 2 * p for name, p in self.named.items()}, (self.images,))
        twice = _matrix(twice, len(self.images))
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


def _own(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.gather(1, labels.long()[:, None])[:, 0]


def _others(outputs: Tensor, labels: Tensor) -> Tensor:
    own = one_hot(labels.long(), outputs.shape[1]).bool()
    return outputs.masked_fill(own, -math.inf)


def _tiny(x: Tensor) -> float:
    """The least positive number of a tensor's precision, against division by zero."""
    return torch.finfo(x.dtype).tiny


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(t.detach())) for t in tensors))


def _unexplained(parameters: Sequence[Tensor], gradient: Sequence[Tensor]) -> float:
    """min_{c≥0} ‖θ + c∇L‖/‖θ‖: the sine of the angle between θ and −∇L = Σ λ_i ∇m_i, 1 if it is obtuse."""
    inner = -sum(float(p.detach().flatten() @ g.flatten()) for p, g in zip(parameters, gradient, strict=True))
    cosine = inner / max(_norm(parameters) * _norm(gradient), 1e-300)
    return math.sqrt(max(1 - max(cosine, 0.0) ** 2, 0.0))
