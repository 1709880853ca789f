"""Datasets, and how training and held-out images are drawn from them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import DataError, InvalidInputError

ENVIRONMENT = "PALIMPSEST_DATA"


@dataclass(frozen=True)
class Source:
    """All images of a dataset, before sampling.

    Args:
        images: ``(N, C, H, W)``, either bytes or floating-point numbers in [0, 1].
        labels: ``(N,)``, the class of each image, 0…C−1.
        classes: the name of each class.
        positive: the classes that are +1 in the two-class task, or None if there is no natural two-class task.
        sides: the names of the two sides of that task, −1 first.
        names: the name of each image's file, or nothing if the images do not have files.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    positive: frozenset[int] | None = None
    sides: tuple[str, str] = ("negative", "positive")
    names: tuple[str, ...] = ()

    @classmethod
    def of_two(
        cls, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], names: tuple[str, ...] = ()
    ) -> Self:
        """A source whose two classes, if it has exactly two, are the sides of the two-class task."""
        if len(classes) != 2:
            return cls(images, labels, classes, names=names)
        return cls(images, labels, classes, positive=frozenset({1}), sides=(classes[0], classes[1]), names=names)


@dataclass(frozen=True)
class Part:
    """Images ``(N, C, H, W)`` in [0, 1], float32, and their labels: ±1, or 0…C−1 (int64)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """Training images, held-out images of the same kind, and the mean to subtract before training.

    Args:
        name: the name that was loaded.
        train: the images to train on.
        held_out: images of the same classes. None of them equals a training image.
        mean: ``(C, H, W)``, the mean over training *and* held-out images. A mean over the training images alone would
            contain a trace of each of them.
        classes: the names of the labels. For ±1, the name of −1 is first.
    """

    name: str
    train: Part
    held_out: Part
    mean: Tensor
    classes: tuple[str, ...]

    @property
    def image_shape(self) -> tuple[int, ...]:
        return tuple(self.train.images.shape[1:])

    def centred(self, images: Tensor) -> Tensor:
        """Images as the network sees them: x − mean."""
        return images - self.mean.to(images)


SOURCES: dict[str, Callable[[Path | None], Source]] = {}


def register(name: str) -> Callable[[Callable[[Path | None], Source]], Callable[[Path | None], Source]]:
    """Register a function that reads a dataset, so that `load` finds it under a name.

    The function takes a data folder, or None, and returns a `Source`.

    Args:
        name: the name for `load`.

    Examples:
        >>> @register("noise")
        ... def noise(root):
        ...     return Source(np.random.rand(8, 1, 4, 4), np.arange(8) % 2, ("a", "b"))
        >>> load("noise", per_class=1, task="classes").image_shape
        (1, 4, 4)
        >>> _ = SOURCES.pop("noise")
    """

    def add(read: Callable[[Path | None], Source]) -> Callable[[Path | None], Source]:
        SOURCES[name] = read
        return read

    return add


def names() -> tuple[str, ...]:
    """The datasets that `load` knows by name.

    Examples:
        >>> names()
        ('cifar10', 'cifar10-test', 'digits', 'faces', 'mnist')
    """
    return tuple(sorted(SOURCES))


def load(
    name: str | Path,
    *,
    per_class: int = 20,
    held_out_per_class: int | None = None,
    seed: int = 0,
    task: Literal["binary", "classes"] | None = None,
    data_root: str | Path | None = None,
    apart_from: Sequence[int] = (),
) -> DataSet:
    """Draw a balanced sample of training images and a separate sample of held-out images.

    Args:
        name: one of `names`, a folder with one sub-folder of PNG or JPEG images per class, or an ``.npz`` file with the
            arrays ``images`` and ``labels``.
        per_class: the number of training images of each class.
        held_out_per_class: the number of held-out images of each class. None is the number of training images.
        seed: the same seed gives the same images.
        task: ``"binary"`` for labels ±1, ``"classes"`` for 0…C−1. None is binary if the dataset has a two-class task.
        data_root: the folder with the official files of ``mnist``, ``cifar10`` and ``cifar10-test``. None uses the
            environment variable PALIMPSEST_DATA. Without either, the files are downloaded once and kept.
        apart_from: seeds whose images are left out. Use it to tune on some images and report on others.

    Examples:
        >>> data = load("digits", per_class=5, held_out_per_class=8)
        >>> data.image_shape, len(data.train), len(data.held_out), data.classes
        ((1, 8, 8), 10, 16, ('even', 'odd'))
        >>> data.train.labels.tolist()
        [-1, -1, -1, -1, -1, 1, 1, 1, 1, 1]
    """
    held_out_per_class = per_class if held_out_per_class is None else held_out_per_class
    if per_class < 1 or held_out_per_class < 1:
        raise InvalidInputError("per_class or held_out_per_class is less than 1; give at least one image per class")
    source = _read(name, data_root)
    labels, values, classes = _targets(source, task)
    draw = partial(_draw, source.images, labels, (per_class, held_out_per_class), classes)
    others = [row for other in apart_from for part in draw(other) for row in part]
    rows = draw(seed, leave_out=others)
    train, held_out = (Part(unit(source.images[r]), torch.from_numpy(values[labels[r]])) for r in rows)
    mean = torch.cat([train.images, held_out.images]).mean(0)
    return DataSet(str(name), train, held_out, mean, classes)


def _read(name: str | Path, data_root: str | Path | None) -> Source:
    from palimpsest.datasets import arrays, folder

    if name in SOURCES:
        root = data_root or os.environ.get(ENVIRONMENT)
        return SOURCES[str(name)](Path(root).expanduser() if root else None)
    path = Path(name).expanduser()
    if path.is_dir():
        return folder.read(path)
    if path.suffix == ".npz":
        return arrays.read(path)
    raise DataError(
        f"the dataset {str(name)!r} does not exist; choose {', '.join(names())}, a folder with one sub-folder of "
        "images per class, or an .npz file"
    )


def _targets(source: Source, task: str | None) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Index of each image's class in the task, the label value of each index, the name of each index."""
    if task not in (None, "binary", "classes"):
        raise InvalidInputError(f"task is {task!r}; choose 'binary' or 'classes'")
    if task == "classes" or (task is None and source.positive is None):
        return source.labels, np.arange(len(source.classes)), source.classes
    if source.positive is None:
        raise InvalidInputError(f"these {len(source.classes)} classes do not have a binary task; choose 'classes'")
    return np.isin(source.labels, list(source.positive)).astype(np.int64), np.array([-1, 1]), source.sides


def _draw(
    images: np.ndarray,
    labels: np.ndarray,
    counts: tuple[int, int],
    classes: tuple[str, ...],
    seed: int,
    leave_out: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and held-out rows. An image that occurs twice is drawn at most once."""
    if seed < 0:
        raise InvalidInputError(f"the seed is {seed}; give a number that is not negative")
    rng = np.random.default_rng(seed)
    seen = {_content(images[row]) for row in leave_out}
    drawn: tuple[list[int], list[int]] = ([], [])
    for index, name in enumerate(classes):
        rows: list[int] = []
        for row in rng.permutation(np.flatnonzero(labels == index)):
            if len(rows) == sum(counts):
                break
            if (content := _content(images[row])) not in seen:
                seen.add(content)
                rows.append(int(row))
        if len(rows) < sum(counts):
            wanted = f"{counts[0]} for training and {counts[1]} held-out ones"
            raise DataError(f"class {name!r} has {len(rows)} different images, not {wanted}; ask for fewer per class")
        drawn[0].extend(rows[: counts[0]])
        drawn[1].extend(rows[counts[0] :])
    return np.array(drawn[0]), np.array(drawn[1])


def _content(image: np.ndarray) -> bytes:
    return (image + 0.0).tobytes()  # + 0.0: −0 and 0 are the same pixel


def unit(images: np.ndarray) -> Tensor:
    """Float32 images in [0, 1]; bytes are divided by 255."""
    scale = 255 if images.dtype == np.uint8 else 1
    return torch.from_numpy(images.astype(np.float32) / np.float32(scale))
