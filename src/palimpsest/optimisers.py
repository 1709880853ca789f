"""First-order updates with their state in the open, so that it can be saved, split and resumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError

Moments = dict[str, Tensor]


class Pace(NamedTuple):
    """How far one step goes."""

    rate: Tensor | float
    unbias: Tensor | float = 1.0
    """The factor on Adam's mean of squares that makes up for its start at zero."""


class Optimiser(ABC):
    """An update rule for one tensor; its memory is a dictionary of tensors shaped like it."""

    learning_rate: float

    @abstractmethod
    def init(self, parameter: Tensor) -> Moments:
        """The memory before the first step."""

    @abstractmethod
    def pace(self, step: int, factor: float) -> Pace:
        """Of step number ``step`` (from 1), at ``factor`` times the learning rate."""

    @abstractmethod
    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        """Change parameter and memory, in place, by one step."""

    @abstractmethod
    def rescaled(self, moments: Moments, scale: Tensor) -> Moments:
        """The memory of a parameter whose gradients would have been ``scale`` times as large."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """Kingma and Ba's rule: steps of about the learning rate, whatever the size of the gradient."""

    learning_rate: float = 0.02
    β1: float = 0.9
    β2: float = 0.999
    ε: float = 1e-12

    def __post_init__(self) -> None:
        _require_positive(self.learning_rate)

    def init(self, parameter: Tensor) -> Moments:
        return {"mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate / (1 - self.β1**step), 1 / (1 - self.β2**step))

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        mean = moments["mean"].lerp_(gradient, 1 - self.β1)
        square = moments["square"].mul_(self.β2).addcmul_(gradient, gradient, value=1 - self.β2)
        parameter.addcdiv_(mean, (square * pace.unbias).sqrt_().add_(self.ε).div_(-pace.rate))

    def rescaled(self, moments: Moments, scale: Tensor) -> Moments:
        return {"mean": moments["mean"] * scale, "square": moments["square"] * scale.square()}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimiser):
    """Gradient descent with heavy-ball momentum."""

    learning_rate: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_positive(self.learning_rate)

    def init(self, parameter: Tensor) -> Moments:
        return {"velocity": torch.zeros_like(parameter)}

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate)

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        parameter.sub_(pace.rate * moments["velocity"].mul_(self.momentum).add_(gradient))

    def rescaled(self, moments: Moments, scale: Tensor) -> Moments:
        return {"velocity": moments["velocity"] * scale}


def _require_positive(learning_rate: float) -> None:
    if not 0 < learning_rate < float("inf"):
        raise InvalidInputError(f"the learning rate is {learning_rate}; give a positive number")
