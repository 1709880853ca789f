"""The images of a membership test, given and held out: from a folder or an .npz file, with their names."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from palimpsest.auditing.exchange import chosen
from palimpsest.auditing.truth import existing, fitting
from palimpsest.datasets import arrays, folder
from palimpsest.datasets.base import unit
from palimpsest.errors import DataError, InvalidInputError
from palimpsest.runs.journal import printable


@dataclass(frozen=True)
class Given:
    """Images with names and, if the loss is to be tested, labels.

    Args:
        images: (N, C, H, W) in [0, 1].
        names: the name of each image. Empty: its number, from 1.
        labels: (N,) the class of each image: 0…C−1, or ±1 if the network has one output.
        classes: the names of the classes, if their order made the labels.

    Examples:
        >>> Given(torch.zeros(2, 1, 4, 4)).names
        ('1', '2')
    """

    images: Tensor
    names: tuple[str, ...] = ()
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.images) == 0:
            raise InvalidInputError("there are no given or no held-out images; give at least one of each")
        object.__setattr__(self, "names", self.names or tuple(str(i + 1) for i in range(len(self.images))))

    def __len__(self) -> int:
        return len(self.images)

    def thinned(self, most: int) -> Self:
        """At most this number of the images."""
        rows = chosen(len(self), most)
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, images=self.images[rows], names=tuple(self.names[i] for i in rows), labels=labels)


def load(images: str, held_out: str, *, image_shape: tuple[int, ...], labelled: bool) -> tuple[Given, Given]:
    """Read given and held-out images. The sub-folders of the held-out images, in alphabetical order, number classes."""
    given, others = (_read(place, image_shape) for place in (images, held_out))
    if not labelled:
        return replace(given, labels=None, classes=()), replace(others, labels=None, classes=())
    if given.labels is None or others.labels is None:
        raise DataError("the loss needs classes; give --images and --held-out with a sub-folder per class, or labels")
    if bool(given.classes) != bool(others.classes):
        raise DataError("sub-folders and labels number classes in different ways; give two folders, or two .npz files")
    if not others.classes:
        return given, others
    if unknown := sorted(set(given.classes) - set(others.classes)):
        raise DataError(f"the held-out images do not have the class {unknown[0]!r} of the given ones; add it")
    number = torch.tensor([others.classes.index(name) for name in given.classes])
    return replace(given, labels=number[given.labels], classes=others.classes), others


def check_apart(given: Given, held_out: Given) -> None:
    """Refuse held-out images of another shape, and images that are given and held out."""
    if given.images.shape[1:] != held_out.images.shape[1:]:
        shapes = f"{tuple(given.images.shape[1:])} and the held-out images {tuple(held_out.images.shape[1:])}"
        raise InvalidInputError(f"the given images are {shapes}; bring both to the size that the network sees")
    known = {image.numpy().tobytes(): name for image, name in zip(given.images.cpu(), given.names, strict=True)}
    for image in held_out.images.to(given.images).cpu():
        if (name := known.get(image.numpy().tobytes())) is not None:
            raise InvalidInputError(f"the image {name} is given and held out; hold out other images")


def _read(place: str, image_shape: tuple[int, ...]) -> Given:
    """The images, with labels if each is in a sub-folder, or if the file has them."""
    path = existing(place)
    names: list[str] = []
    classes: list[str] = []
    labels = None
    if path.is_dir():
        pixels, names = folder.read_unlabelled(path)
        folders = [name.rpartition("/")[0] for name in names]
        if all(folders):
            classes = sorted(set(folders))
            labels = torch.tensor([classes.index(name) for name in folders])
    else:
        pixels, numbered = arrays.read_unlabelled(path)
        labels = None if numbered is None else torch.from_numpy(numbered.astype(np.int64))
    return Given(unit(fitting(pixels, place, image_shape)), tuple(map(printable, names)), labels, tuple(classes))
