"""The images of a membership test, given and held out: from a folder or an .npz file, with their names."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from palimpsest.auditing.truth import numbers
from palimpsest.datasets import arrays, folder
from palimpsest.datasets.base import unit
from palimpsest.errors import DataError, InvalidInputError


@dataclass(frozen=True)
class Given:
    """Images with names and, if the loss is to be tested, labels.

    Args:
        images: (N, C, H, W) in [0, 1].
        names: the name of each image. Empty: its number.
        labels: (N,) the class of each image, 0…C−1.

    Examples:
        >>> Given(torch.zeros(2, 1, 4, 4)).names
        ('0', '1')
    """

    images: Tensor
    names: tuple[str, ...] = ()
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.images) == 0:
            raise InvalidInputError("there are no given or no held-out images; give at least one of each")
        object.__setattr__(self, "names", self.names or tuple(str(i) for i in range(len(self.images))))

    def __len__(self) -> int:
        return len(self.images)


def load(images: str, held_out: str, *, image_shape: tuple[int, ...], labelled: bool) -> tuple[Given, Given]:
    """Read given and held-out images. The sub-folders of the held-out images, in alphabetical order, number classes."""
    (given, ours), (others, theirs) = (_read(place, image_shape) for place in (images, held_out))
    if not labelled:
        return given, others
    if ours is None or theirs is None:
        raise DataError("the loss needs classes; give --images and --held-out with a sub-folder per class, or labels")
    order = sorted(set(theirs), key=lambda name: (int(name), name) if name.isdecimal() else (-1, name))
    if unknown := sorted(set(ours) - set(order)):
        raise DataError(f"the held-out images do not have the class {unknown[0]!r} of the given ones; add it")
    numbered = [torch.tensor([order.index(name) for name in classes]) for classes in (ours, theirs)]
    return replace(given, labels=numbered[0]), replace(others, labels=numbered[1])


def scale(mean: str, std: str, image_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation that a user gave, as for an audit."""
    deviation = numbers(std, image_shape)
    if not bool((deviation > 0).all() and deviation.isfinite().all()):
        raise InvalidInputError(f"the standard deviation is {std}; give positive numbers")
    return numbers(mean, image_shape), deviation


def check_apart(given: Given, held_out: Given) -> None:
    """Refuse held-out images of another shape, and images that are given and held out."""
    if given.images.shape[1:] != held_out.images.shape[1:]:
        shapes = f"{tuple(given.images.shape[1:])} and the held-out images {tuple(held_out.images.shape[1:])}"
        raise InvalidInputError(f"the given images are {shapes}; bring both to the size that the network sees")
    known = {image.numpy().tobytes(): name for image, name in zip(given.images.cpu(), given.names, strict=True)}
    for image in held_out.images.to(given.images).cpu():
        if (name := known.get(image.numpy().tobytes())) is not None:
            raise InvalidInputError(f"the image {name} is given and held out; hold out other images")


def _read(place: str, image_shape: tuple[int, ...]) -> tuple[Given, list[str] | None]:
    """The images, and the name of the class of each, if there are classes."""
    path = Path(place).expanduser()
    if not path.exists():
        raise DataError(f"there is no {place}; give a folder with images, or an .npz file")
    if path.is_dir():
        images, names = folder.read_unlabelled(path)
        classes = [name.rpartition("/")[0] for name in names]
    else:
        images, labels = arrays.read_unlabelled(path)
        names, classes = [], [] if labels is None else [str(label) for label in labels.tolist()]
    if images.shape[1:] != image_shape:
        raise DataError(f"the images of {place} are {images.shape[1:]} but the network sees {image_shape}; resize them")
    return Given(unit(images), tuple(names)), classes if classes and all(classes) else None
