"""`pal.train` trains a network on its images, and says how converged it is."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError, TrainingDivergedError
from palimpsest.execution import Execution, Tensors
from palimpsest.training.descent import Descent, part
from palimpsest.training.problem import LossName, TrainingProblem

Record = dict[str, float]


class Convergence(StrEnum):
    """How training ended."""

    CONVERGED = "converged"
    OUT_OF_STEPS = "ran out of steps"


@dataclass(frozen=True)
class Fit:
    """A trained network, its initial weights, and how converged it is.

    Args:
        model: the trained network, in evaluation mode.
        initial: its parameters and buffers before training.
        history: records of step, learning_rate, loss, log_loss, gap and, if defined, margin and kkt_residual.
        outcome: whether ``gap`` fell below ``tolerance``.
        gap: the measure of convergence; see `train`.
        tolerance: the gap that counts as converged.
        loss: the mean loss at the end. It may underflow, but ``history[-1]["log_loss"]`` does not.
        accuracy: the share of training images on the right side, NaN for real-valued targets.
        margin: min_i y_i Φ(x_i), or min_i Φ_y(x_i) − max_{j≠y} Φ_j(x_i).
        degree: L with Φ(cθ) = c^L Φ(θ), or None if the network is not homogeneous.
        normalised_margin: margin/‖θ‖^L, or None if the network is not homogeneous.
        kkt_residual: min_{c≥0} ‖θ − c Σ_i λ_i ∇m_i‖/‖θ‖ with the loss's own weights λ_i. It is 0 at a KKT point of the
            maximum-margin problem, and 1 if the data explain nothing. It is None for squared loss. It need not vanish
            if units sit on the kink of a ReLU.
    """

    model: nn.Module
    initial: dict[str, Tensor]
    history: list[Record]
    outcome: Convergence
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
        return self.outcome is Convergence.CONVERGED

    @property
    def summary(self) -> str:
        """One sentence on how training ended."""
        steps = int(self.history[-1]["step"])
        end = "converged" if self.converged else "did not converge"
        accuracy = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.0%}"
        gap = f"gap {self.gap:.2g} (asked for {self.tolerance:.2g})"
        return f"Training {end} in {steps} steps: {gap}, loss {self.loss:.2g}{accuracy}."


@torch.inference_mode(False)  # training needs gradients, whatever mode the caller is in
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
    """Train a copy of a network on all images at once. The network that you pass does not change.

    The network sees the images as they are, so centre them first if it should see centred images. It computes as in
    evaluation mode: dropout is off, and normalisation layers keep their statistics.

    Args:
        model: any network with outputs ``(k,)``, ``(k, 1)`` or ``(k, C)``.
        images: ``(n, …)``, moved to the network's device and precision.
        labels: ±1 for one output, 0…C−1 for C outputs. Squared loss also takes real targets, one for each output.
        loss: the mean of (Φ − y)², of log(1 + e^{−yΦ}), or of the cross-entropy of the softmax.
        steps: the largest number of steps.
        learning_rate: a constant η. None is 1/(2λ), where λ is the largest eigenvalue of the Gauss–Newton curvature of
            F, followed during training.
        momentum: μ.
        weight_decay: δ in L + ½δ‖θ‖². The loss is then not replaced by its logarithm.
        tolerance: the gap at which to stop. Squared loss: the largest error |Φ(x_i) − y_i|, by default 0.01. Separable
            losses: the KKT residual once all images are on the right side, by default 0.1, which few networks reach.
            With weight decay: the share by which F fell in the last 500 steps, by default 0.001.
        record_every: the number of steps between two entries of the history.
        callback: called with each new entry.
        execution: how steps are carried out. None is as fast as the device allows.

    Examples:
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
    problem = TrainingProblem(model, images, labels, loss, weight_decay)
    tolerance = problem.default_tolerance if tolerance is None else tolerance
    descent = Descent(problem, steps, learning_rate, momentum, tolerance)
    how = execution or Execution(tf32=False)  # margins of hundreds need more than TF32's three digits
    likely = steps // 10  # most trainings converge long before their limit
    kind = (loss, learning_rate is None, weight_decay, steps)
    executor = how.executor(descent.programs, problem.images.device, problem=repr(kind))
    history: list[Record] = []

    def record(entry: Tensors) -> None:
        history.append(_record(entry))
        if callback:
            callback(history[-1])

    with how.matrix_precision(problem.images.device):
        tensors, stopped, step = descent.start(), False, 0
        while not stopped:
            tensors, seen = executor.run(tensors, descent.plan(step, record_every), left=likely - step)
            status = [tensors[name].long() for name in ("step", "diverged", "stopped")]
            step, diverged, stopped = torch.stack(status).tolist()
            if diverged >= 0:
                raise TrainingDivergedError(diverged, "lower the learning rate, or leave it out to have it chosen")
            for entry in seen:
                if not stopped or int(entry["step"]) < step:  # the last step is recorded below
                    record(entry)
        record(descent.look(tensors))
        return _fit(problem, tensors, initial, history, tolerance)


@torch.no_grad()
def _fit(
    problem: TrainingProblem, tensors: Tensors, initial: dict[str, Tensor], history: list[Record], tolerance: float
) -> Fit:
    """The network with its final weights, and the last entry of the history."""
    θ, last = part(tensors, "θ"), history[-1]
    problem.network.write(θ)
    degree, margin = problem.degree(θ), last.get("margin", math.nan)
    norm = math.hypot(*(float(torch.linalg.vector_norm(p)) for p in θ.values()))
    return Fit(
        model=problem.network.model,
        initial=initial,
        history=history,
        outcome=Convergence.CONVERGED if last["gap"] <= tolerance else Convergence.OUT_OF_STEPS,
        gap=last["gap"],
        tolerance=tolerance,
        loss=last["loss"],
        accuracy=problem.accuracy(θ),
        margin=margin,
        degree=degree,
        normalised_margin=None if degree is None else margin / norm**degree,
        kkt_residual=last.get("kkt_residual"),
    )


def _record(entry: Tensors) -> Record:
    """One entry of the history, read from the device at once. It leaves out numbers that are not defined."""
    values = dict(zip(entry, torch.stack([t.double() for t in entry.values()]).tolist(), strict=True))
    record = {"step": int(values["step"]), "learning_rate": values["rate"]}
    record |= {"loss": math.exp(min(values["log_loss"], 700.0)), "log_loss": values["log_loss"], "gap": values["gap"]}
    return record | {name: values[name] for name in ("margin", "kkt_residual") if not math.isnan(values[name])}


def _check(loss: str, steps: int, rate: float | None, momentum: float, decay: float, tolerance: float | None) -> None:
    if loss not in ("squared", "logistic", "cross_entropy"):
        raise InvalidInputError(f"loss is {loss!r}; choose 'squared', 'logistic' or 'cross_entropy'")
    if steps < 1 or not 0 <= momentum < 1 or not 0 <= decay < math.inf:
        raise InvalidInputError("training needs steps ≥ 1, 0 ≤ momentum < 1 and weight_decay ≥ 0")
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidInputError(f"learning_rate is {rate}; give a positive number or leave it out")
    if tolerance is not None and not tolerance > 0:
        raise InvalidInputError(f"tolerance is {tolerance}; give a positive number or leave it out")
