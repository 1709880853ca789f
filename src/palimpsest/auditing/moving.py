"""Trainings of a positive control: it moves as far from its start as the audited network did."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from palimpsest.errors import TrainingDivergedError
from palimpsest.objectives.binding import parameters_of
from palimpsest.objectives.smoothing import failures_named
from palimpsest.training import train

Tick = Callable[[Mapping[str, Any]], object] | None
TRAININGS, LEAST_POWER = 6, 0.3  # of the positive control, to move as far as the subject
TOO_FAR, BEYOND = 1.3, 1.1  # of the subject's distance: the upper limit, and the aim
FITTED = 0.01  # error at which a training ends, relative to the change of the outputs
RATE = 2e-3  # of Adam, relative to the size of the weights


@dataclass(frozen=True)
class Moved:
    """A network, its weights before, and the number of steps between them."""

    model: nn.Module
    initial: dict[str, Tensor]
    steps: int
    state: dict[str, Any] | None = None
    """Of the optimiser, if a further training can continue with it."""


Training = Callable[..., Moved]


def live(model: nn.Module) -> nn.Module:
    """A copy with live batch normalisation: without running statistics, torch uses those of the batch in every mode."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return model


def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """Raises a named error if the network fails, for example on a batch of one image with live batch normalisation."""
    with failures_named():
        return model(images)


def by_descent(
    model: nn.Module, images: Tensor, targets: Tensor, steps: int, tolerance: float, tick: Tick, state: None = None
) -> Moved:
    """A training by gradient descent. The callback may stop it."""
    fit = train(model, images, targets, steps=steps, tolerance=tolerance, callback=tick)
    return Moved(fit.model, fit.initial, int(fit.history[-1]["step"]))


def by_adam(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    steps: int,
    tolerance: float,
    tick: Tick,
    state: dict[str, Any] | None = None,
) -> Moved:
    """The same by Adam, with this state or a new one."""
    model = copy.deepcopy(model).eval()
    initial = {name: t.detach().clone() for name, t in model.state_dict().items()}
    θ = [p for p in model.parameters() if p.requires_grad]
    size = math.sqrt(sum(float(p.detach().square().sum()) for p in θ) / sum(p.numel() for p in θ))
    rule = torch.optim.Adam(θ, lr=RATE * size)
    if state is not None:
        rule.load_state_dict(copy.deepcopy(state))
    for step in range(1, steps + 1):
        rule.zero_grad()
        off = outputs_of(model, images).reshape(targets.shape) - targets
        off.square().mean().backward()
        rule.step()
        if not all(bool(p.isfinite().all()) for p in θ):
            raise TrainingDivergedError(step, "the weights are too large for public images")
        if tick is not None:
            tick({"step": step})
        if float(off.detach().abs().max()) < tolerance:
            break
    return Moved(model, initial, step, rule.state_dict())


def distance(θ: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None) -> float:
    """How far training went: ‖θ − θ_0‖, or ‖θ‖ if the start is unknown."""
    start = {name: torch.zeros_like(t) if initial is None else initial[name].to(t) for name, t in θ.items()}
    return math.hypot(*(float((t - start[name]).double().norm()) for name, t in θ.items()))


def moved_as_far(
    training: Training,
    model: nn.Module,
    goal: float,
    images: Tensor,
    y: Tensor,
    steps: int,
    tick: Tick = None,
    state: dict[str, Any] | None = None,
) -> Moved:
    """Fit the targets Φ(x) + s·y, with s such that the network moves as far as the goal.

    The distance is about a power of s, so a few trainings find it. All of them together take at most ``steps``.
    """
    s, power = 1.0, 1.0
    found, before = None, None
    with torch.no_grad():
        Φ = outputs_of(model, images).reshape(y.shape)
    for _ in range(TRAININGS):
        try:
            found = training(model, images, Φ + s * y, steps, FITTED * s, tick, state)
        except TrainingDivergedError:
            if found is None:
                raise
            break
        steps -= found.steps
        way = distance(parameters_of(found.model), found.initial)
        if goal <= way <= TOO_FAR * goal or steps < 1 or way == 0:
            break
        if before is not None and way != before[1]:
            power = min(max(math.log(way / before[1]) / math.log(s / before[0]), LEAST_POWER), 1.0)
        before = (s, way)
        s *= (BEYOND * goal / way) ** (1 / power)
    assert found is not None
    return found
