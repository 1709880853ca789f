"""Where candidates may live: all of image space, or an affine subspace of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError


class Parametrisation(Protocol):
    """Coordinates c of candidates, a tensor (k, *shape), and the images x(c) they stand for."""

    @property
    def image_shape(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def unit(self) -> float:
        """How far one coordinate moves when every pixel of an image moves by one; the scale of steps in c."""

    def images(self, coordinates: Tensor) -> Tensor:
        """x(c)."""

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """(∂x/∂c)ᵀ times a gradient with respect to the images."""

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Parametrisation:
        """The same coordinates on another device or in another precision."""


@dataclass(frozen=True)
class Everywhere:
    """x = c: every image is allowed."""

    image_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.image_shape

    @property
    def unit(self) -> float:
        return 1.0

    def images(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def pulled_back(self, gradient: Tensor) -> Tensor:
        return gradient

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Everywhere:
        return self


@dataclass(frozen=True)
class Subspace:
    """The images x = x̄ + Q c, where Q has orthonormal columns.

    `pal.span` returns one, and `pal.reconstruct` searches in it.

    Attributes:
        offset: x̄, shape (*image_shape,).
        basis: Q transposed, shape (n, *image_shape).

    Examples:
        >>> space = Subspace(torch.zeros(4), torch.eye(4)[:2])
        >>> space.images(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0., 0.]])
    """

    offset: Tensor
    basis: Tensor

    def __post_init__(self) -> None:
        if self.basis.shape[1:] != self.offset.shape or len(self.basis) == 0:
            raise InvalidInputError(
                f"a basis of shape {tuple(self.basis.shape)} does not fit an offset of shape {tuple(self.offset.shape)}"
            )

    @property
    def image_shape(self) -> tuple[int, ...]:
        return tuple(self.offset.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.basis),)

    @property
    def unit(self) -> float:
        return math.sqrt(self.offset.numel() / len(self.basis))

    def images(self, coordinates: Tensor) -> Tensor:
        """The images (k, *image_shape) of coordinates (k, n)."""
        flat = self.offset.flatten() + coordinates @ self.basis.flatten(1)
        return flat.reshape(len(coordinates), *self.image_shape)

    def coordinates(self, images: Tensor) -> Tensor:
        """c = Qᵀ(x − x̄), the coordinates of the nearest point of the subspace."""
        return (images - self.offset).flatten(1) @ self.basis.flatten(1).T

    def pulled_back(self, gradient: Tensor) -> Tensor:
        return gradient.flatten(1) @ self.basis.flatten(1).T

    def shaped(self, image_shape: tuple[int, ...]) -> Subspace:
        """The same subspace with images of another shape."""
        if math.prod(image_shape) != self.offset.numel():
            raise InvalidInputError(
                f"the subspace holds {self.offset.numel()} pixels, which is not a {image_shape} image"
            )
        return Subspace(self.offset.reshape(image_shape), self.basis.reshape(-1, *image_shape))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subspace:
        # A copy: tensors made under torch.inference_mode() cannot be differentiated through.
        return Subspace(self.offset.to(device, dtype, copy=True), self.basis.to(device, dtype, copy=True))
