"""First-order updates with an explicit state, which can be saved, split and resumed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Units(Protocol):
    """Start and steps in the raw numbers of a published recipe, whose loss has the mean (1/k) Σ_i λ_i f(x_i).

    The learning rate acts on the gradient of L itself, not of L / ‖T‖², and penalties are added to L as they are.
    Multipliers are not kept above zero.
    """

    pixels: float  # standard deviation of the initial pixels
    multiplier_rate: float | None  # learning rate of the multipliers; None is that of the images

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Initial λ, in float64."""
