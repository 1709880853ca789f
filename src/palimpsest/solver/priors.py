"""Priors: penalties on images and multipliers that are added to L.

Each prior has one dimensionless weight. Penalties are means over candidates and pixels, times ‖T‖², the loss without
candidates. One default then serves networks and images of every size.
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
    """A penalty on images (k, C, H, W), as the network sees them, and on multipliers (k, …). Subclass it for your own.

    A penalty is relative to ‖T‖². The solver passes the multipliers in their natural unit.

    Examples:
        >>> class Dark(Prior):
        ...     def value(self, images, multipliers):
        ...         return images.clamp_min(0).mean()
        >>> (Dark() + Box()).value(torch.ones(2, 1, 4, 4), torch.ones(2))
        tensor(1.)
    """

    @abstractmethod
    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        """The penalty, differentiable in both arguments."""

    @property
    def closed_form(self) -> bool:
        """Whether its gradients are written out, so that they may be compiled."""
        return type(self).gradients is not Prior.gradients

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """(∂/∂images, ∂/∂multipliers), by autograd. Override it with a closed form to gain speed."""
        x, λ = images.detach().requires_grad_(), multipliers.detach().requires_grad_()
        with torch.enable_grad():
            value = self.value(x, λ)
        if not value.requires_grad:
            return torch.zeros_like(x), torch.zeros_like(λ)
        dx, dλ = torch.autograd.grad(value, (x, λ), materialize_grads=True)
        return dx, dλ

    def placed(self, like: Tensor) -> Prior:
        """The same prior, with its tensors on the device and in the precision of ``like``."""
        return self

    def __add__(self, other: Prior) -> Sum:
        return Sum((self, other))


@dataclass(frozen=True)
class Sum(Prior):
    """The sum of several priors."""

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
    """Images stay within [low, high]: weight · mean over pixels of the squared distance from this range.

    Candidates are centred if the network saw centred images. The default range holds any centring of images in [0, 1].
    If you know the mean, use ``Box.around(mean)``. It helps most if many pixels are black or white.

    The bounds ``low`` and ``high`` are numbers or images.

    Examples:
        >>> Box().value(torch.full((2, 1, 4, 4), 3.0), torch.ones(2))
        tensor(4.)
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
    """Images are smooth: weight · mean over pixels of √(δ² + smoothing).

    δ is the difference to the next pixel, in both directions. ``smoothing`` makes the penalty differentiable at δ = 0.

    Examples:
        >>> float(TotalVariation(smoothing=0.0).value(torch.ones(2, 1, 4, 4), torch.ones(2)))
        0.0
    """

    weight: float = 0.1
    smoothing: float = 1e-3

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        if images.ndim < 4:  # not an image
            return images.new_zeros(())
        across, down = ((images.diff(dim=axis).square() + self.smoothing).sqrt().sum() for axis in (-1, -2))
        return self.weight * (across + down) / images.numel()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """Each difference δ adds ±δ / √(δ² + smoothing) at its two pixels."""
        dx = torch.zeros_like(images)
        if images.ndim >= 4:
            for axis, edges in ((-1, (1, 1)), (-2, (0, 0, 1, 1))):
                δ = images.diff(dim=axis)
                pull = δ.square().add_(self.smoothing).rsqrt_().mul_(δ)
                dx -= F.pad(pull, edges).diff(dim=axis)
        return dx.mul_(self.weight / images.numel()), torch.zeros_like(multipliers)


@dataclass(frozen=True, kw_only=True)
class MinimumMultiplier(Prior):
    """Multipliers stay away from 0: weight · mean of max(0, minimum − λ)² / minimum².

    It keeps candidates of a margin method from dying at λ = 0. ``minimum`` is in the natural unit of multipliers.

    Examples:
        >>> MinimumMultiplier().value(torch.ones(2, 1, 4, 4), torch.tensor([0.0, 1.0]))
        tensor(0.5000)
    """

    weight: float = 1.0
    minimum: float = 0.05

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        return self.weight * torch.relu(1 - multipliers / self.minimum).square().mean()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.relu(1 - multipliers / self.minimum)
        return torch.zeros_like(images), (-2 * self.weight / (self.minimum * multipliers.numel())) * below
