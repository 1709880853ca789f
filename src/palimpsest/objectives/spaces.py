"""The space of the candidates: coordinates c, a tensor (k, *shape), and the images x(c) that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Cosines:
    """Every image x = B c, by how much it holds of each cosine and colour, relative to natural images.

    The amplitudes of natural images fall with the frequency f about like 1/(1 + f), and their channels are alike.
    B adds up cosines on the axes of an image, each as large as that. Steps of one length in c then shape an image at
    all sizes at once. Steps of one length in pixels build up noise before they find large shapes.

        x = Σ s_uab c_uab C_u ⊗ D_a ⊗ E_b,   s_uab ∝ 1 / ((1 + u) (1 + f)),   mean of s² = 1

    with the orthonormal cosines C of the channels, D of the rows and E of the columns. f = n √((a/h)² + (b/w)²) for h
    rows and w columns, of which n is the larger number. Images may have one axis besides the channels, or three.
    `Cosines.of` makes the space. Splitting and certificates measure displacements and curvatures in c.

    Examples:
        >>> space = Cosines.of((1, 2, 2))
        >>> flat = space.images(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]))
        >>> bool((flat == flat.mean()).all())
        True
    """

    scale: Tensor  # s
    cosines: tuple[Tensor, ...]  # of each axis, a row for each frequency

    @classmethod
    def of(cls, image_shape: Sequence[int]) -> Cosines:
        """For images of this shape. The first axis is that of the channels, even if there is only one."""
        if len(image_shape) < 2:
            raise InvalidInputError(f"the shape {tuple(image_shape)} has one axis; give channels, rows and columns")
        u, *waves = torch.meshgrid(*(torch.arange(size).double() for size in image_shape), indexing="ij")
        _, *sizes = image_shape
        f = max(sizes) * torch.stack([wave / size for wave, size in zip(waves, sizes, strict=True)]).norm(dim=0)
        s = 1 / ((1 + u) * (1 + f))
        return cls(s / s.square().mean().sqrt(), tuple(map(_cosines, image_shape)))

    @property
    def image_shape(self) -> tuple[int, ...]:
        return tuple(self.scale.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.image_shape

    @property
    def unit(self) -> float:
        return 1.0

    def images(self, coordinates: Tensor) -> Tensor:
        """B c."""
        return _along_axes(self.scale.to(coordinates) * coordinates, self.cosines)

    def coordinates(self, images: Tensor) -> Tensor:
        """B⁻¹ x."""
        return self.pulled_back(images) / self.scale.to(images).square()

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """Bᵀ g."""
        return self.scale.to(gradient) * _along_axes(gradient, [rows.T for rows in self.cosines])

    def shaped(self, image_shape: tuple[int, ...]) -> Cosines:
        """The same space, which must be one of such images."""
        if image_shape != self.image_shape:
            raise InvalidInputError(f"the cosines are for the shape {self.image_shape}; give Cosines.of({image_shape})")
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Cosines:
        scale, *cosines = (t.to(device, dtype, copy=True) for t in (self.scale, *self.cosines))
        return Cosines(scale, tuple(cosines))


def _cosines(size: int) -> Tensor:
    """The orthonormal cosines of the discrete cosine transform, a row for each frequency."""
    i = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi * i[:, None] * (i + 0.5) / size)
    return rows / rows.norm(dim=1, keepdim=True)


def _along_axes(values: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Each axis but the first times its matrix."""
    for axis, matrix in enumerate(matrices, start=1):
        values = (values.movedim(axis, -1) @ matrix.to(values)).movedim(-1, axis)
    return values


Space = Subspace | Cosines  # what a caller may give
Parametrisation = Everywhere | Space
