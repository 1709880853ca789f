"""What is known of the images and multipliers before looking at the weights.

A prior adds a penalty to L. Each has one dimensionless weight: penalties are means over candidates and pixels times
‖T‖², the loss of no candidates at all, so that one default serves networks and images of every size.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


class Prior(ABC):
    """A penalty relative to ‖T‖² on images (k, C, H, W), as the network sees them, and multipliers (k, …).

    A solver gives the multipliers in their natural unit (see :class:`~palimpsest.solver.Solver`).
    """

    @abstractmethod
    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        """The penalty, differentiable in both arguments."""

    @property
    def closed_form(self) -> bool:
        """Whether its gradients are written out, so that they may be compiled."""
        return type(self).gradients is not Prior.gradients

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """(∂/∂images, ∂/∂multipliers): by autograd, unless a prior knows better."""
        x, λ = images.detach().requires_grad_(), multipliers.detach().requires_grad_()
        with torch.enable_grad():
            value = self.value(x, λ)
        if not value.requires_grad:
            return torch.zeros_like(x), torch.zeros_like(λ)
        dx, dλ = torch.autograd.grad(value, (x, λ), materialize_grads=True)
        return dx, dλ

    def placed(self, like: Tensor) -> Prior:
        """Itself, with any tensors it holds on the device and in the precision of another."""
        return self

    def __add__(self, other: Prior) -> Sum:
        return Sum((self, other))


@dataclass(frozen=True)
class Sum(Prior):
    """Several priors at once."""

    priors: Sequence[Prior]

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        return sum((prior.value(images, multipliers) for prior in self.priors), images.new_zeros(()))

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        parts = [prior.gradients(images, multipliers) for prior in self.priors]
        if not parts:
            return torch.zeros_like(images), torch.zeros_like(multipliers)
        dx, dλ = (functools.reduce(torch.add, terms) for terms in zip(*parts, strict=True))
        return dx, dλ

    @property
    def closed_form(self) -> bool:
        return all(prior.closed_form for prior in self.priors)

    def placed(self, like: Tensor) -> Sum:
        return Sum(tuple(prior.placed(like) for prior in self.priors))


@dataclass(frozen=True, kw_only=True)
class Box(Prior):
    """weight · mean over pixels of the squared distance from [low, high].

    Candidates are what the network sees, so for centred images the box is the centred one; the default holds any
    centring of images in [0, 1]. Where the mean is known, ``Box.around(mean)`` says more: most of all where many pixels
    are quite black or quite white.
    """

    weight: float = 1.0
    low: float | Tensor = -1.0
    high: float | Tensor = 1.0

    @classmethod
    def around(cls, mean: Tensor, *, weight: float = 1.0) -> Box:
        """The box of images in [0, 1] from which ``mean`` was subtracted."""
        return cls(weight=weight, low=-mean, high=1 - mean)

    def placed(self, like: Tensor) -> Box:
        low, high = (t.to(like) if isinstance(t, Tensor) else t for t in (self.low, self.high))
        return replace(self, low=low, high=high)

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        outside = torch.relu(self.low - images) + torch.relu(images - self.high)
        return self.weight * outside.square().mean()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        outside = torch.relu(images - self.high) - torch.relu(self.low - images)
        return (2 * self.weight / images.numel()) * outside, torch.zeros_like(multipliers)


@dataclass(frozen=True, kw_only=True)
class TotalVariation(Prior):
    """weight · mean over pixels of √(δ² + smoothing), δ the difference to the next pixel, in both directions."""

    weight: float = 0.1
    smoothing: float = 1e-3

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        if images.ndim < 4:  # no second axis to vary along: not an image
            return images.new_zeros(())
        across, down = ((images.diff(dim=axis).square() + self.smoothing).sqrt().sum() for axis in (-1, -2))
        return self.weight * (across + down) / images.numel()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """Each difference δ pulls at its two pixels by ±δ / √(δ² + smoothing); there are none beyond the edges."""
        dx = torch.zeros_like(images)
        if images.ndim >= 4:
            for axis, edges in ((-1, (1, 1)), (-2, (0, 0, 1, 1))):
                δ = images.diff(dim=axis)
                pull = δ.square().add_(self.smoothing).rsqrt_().mul_(δ)
                dx -= F.pad(pull, edges).diff(dim=axis)
        return dx.mul_(self.weight / images.numel()), torch.zeros_like(multipliers)


@dataclass(frozen=True, kw_only=True)
class MinimumMultiplier(Prior):
    """weight · mean of max(0, minimum − λ)² / minimum²: keeps candidates of a margin method from dying at λ = 0."""

    weight: float = 1.0
    minimum: float = 0.05

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        return self.weight * torch.relu(1 - multipliers / self.minimum).square().mean()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.relu(1 - multipliers / self.minimum)
        return torch.zeros_like(images), (-2 * self.weight / (self.minimum * multipliers.numel())) * below
