"""First-order updates with an explicit state, which can be saved, split and resumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError

Moments = dict[str, Tensor]


class Pace(NamedTuple):
    """How far one step goes."""

    rate: Tensor | float
    unbias: Tensor | float = 1.0  # corrects Adam's mean of squares for its start at zero


class Optimiser(ABC):
    """An update rule for one tensor. Its memory is a dictionary of tensors of the same shape."""

    learning_rate: float
    powers: ClassVar[dict[str, int]]  # the memory: by name, the power of the gradient that is averaged

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < float("inf"):
            raise InvalidInputError(f"the learning rate is {self.learning_rate}; give a positive number")

    def init(self, parameter: Tensor) -> Moments:
        """The memory before the first step."""
        return {name: torch.zeros_like(parameter) for name in self.powers}

    def rescaled(self, moments: Moments, scale: Tensor) -> Moments:
        """The memory of a parameter whose gradients were ``scale`` times as large."""
        return {name: moments[name] * scale**power for name, power in self.powers.items()}

    @abstractmethod
    def pace(self, step: int, factor: float) -> Pace:
        """The numbers that the update needs at step ``step`` (from 1), with ``factor`` times the learning rate."""

    @abstractmethod
    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        """Change the parameter and the memory in place by one step."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """Kingma and Ba's rule. Its steps are about as long as the learning rate, whatever the size of the gradient.

    Args:
        learning_rate: the length of a step, in the units of the images.
        β1: the decay of the mean of the gradients.
        β2: the decay of the mean of their squares.
        ε: is added to the denominator.

    Examples:
        >>> rule, x = Adam(learning_rate=0.5), torch.ones(2)
        >>> rule.update_(x, torch.tensor([1.0, 100.0]), rule.init(x), rule.pace(1, 1.0))
        >>> x
        tensor([0.5000, 0.5000])
    """

    powers: ClassVar[dict[str, int]] = {"mean": 1, "square": 2}
    learning_rate: float = 0.02
    β1: float = 0.9
    β2: float = 0.999
    ε: float = 1e-12

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate / (1 - self.β1**step), 1 / (1 - self.β2**step))

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        mean = moments["mean"].lerp_(gradient, 1 - self.β1)
        square = moments["square"].mul_(self.β2).addcmul_(gradient, gradient, value=1 - self.β2)
        parameter.addcdiv_(mean, (square * pace.unbias).sqrt_().add_(self.ε).div_(-pace.rate))


@dataclass(frozen=True, kw_only=True)
class LazyAdam(Adam):
    """Adam that leaves numbers alone whose gradient is exactly zero, with their memory (Loo et al. 2024).

    Each number counts its own steps.

    Examples:
        >>> rule, x = LazyAdam(learning_rate=0.5), torch.ones(2)
        >>> moments = rule.init(x)
        >>> for step in (1, 2):
        ...     rule.update_(x, torch.tensor([1.0, 0.0]), moments, rule.pace(step, 1.0))
        >>> [round(value, 3) for value in x.tolist()], moments["count"]
        ([0.0, 1.0], tensor([2., 0.]))
    """

    powers: ClassVar[dict[str, int]] = {"mean": 1, "square": 2, "count": 0}
    ε: float = 1e-8

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate)

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        mean, square, count = moments["mean"], moments["square"], moments["count"]
        moves = gradient != 0
        mean.copy_(torch.where(moves, self.β1 * mean + (1 - self.β1) * gradient, mean))
        square.copy_(torch.where(moves, self.β2 * square + (1 - self.β2) * gradient * gradient, square))
        count.add_(moves)
        taken = count.clamp_min(1)  # a number that never moved has no mean to correct
        m, v = mean / (1 - self.β1**taken), square / (1 - self.β2**taken)
        parameter.sub_(torch.where(moves, pace.rate * m / (v.sqrt() + self.ε), 0.0))


@dataclass(frozen=True, kw_only=True)
class SGD(Optimiser):
    """Gradient descent with heavy-ball momentum.

    Args:
        learning_rate: the length of a step relative to the gradient.
        momentum: the share of the velocity that is kept at each step.
    """

    powers: ClassVar[dict[str, int]] = {"velocity": 1}
    learning_rate: float
    momentum: float = 0.9

    def pace(self, step: int, factor: float) -> Pace:
        return Pace(factor * self.learning_rate)

    def update_(self, parameter: Tensor, gradient: Tensor, moments: Moments, pace: Pace) -> None:
        parameter.sub_(pace.rate * moments["velocity"].mul_(self.momentum).add_(gradient))
