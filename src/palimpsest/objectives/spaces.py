"""The space of the candidates: coordinates c, a tensor (k, *shape), and the images x(c) that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError


@dataclass(frozen=True)
class Everywhere:
    """x = c: every image is allowed."""

    image_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one candidate's coordinates."""
        return self.image_shape

    @property
    def unit(self) -> float:
        """How far one coordinate moves when every pixel of an image moves by one; the scale of steps in c."""
        return 1.0

    def images(self, coordinates: Tensor) -> Tensor:
        """x(c)."""
        return coordinates

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """(∂x/∂c)ᵀ times a gradient with respect to the images."""
        return gradient

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Everywhere:
        """The same coordinates on another device or in another precision."""
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
            shape, fitting = tuple(self.basis.shape), ("n", *self.offset.shape)
            raise InvalidInputError(f"the basis has shape {shape}; give the shape {fitting}, which fits the offset")

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
            pixels = self.offset.numel()
            raise InvalidInputError(f"the subspace holds images of {pixels} pixels; give an image_shape of that size")
        return Subspace(self.offset.reshape(image_shape), self.basis.reshape(-1, *image_shape))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subspace:
        # A copy, because tensors made under torch.inference_mode() cannot be differentiated.
        return Subspace(self.offset.to(device, dtype, copy=True), self.basis.to(device, dtype, copy=True))


Parametrisation = Everywhere | Subspace
