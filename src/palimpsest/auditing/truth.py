"""The training images, if the auditor has them: they score the candidates and test the method's assumption."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from palimpsest.datasets import arrays, folder
from palimpsest.datasets.base import Source, unit
from palimpsest.errors import DataError, InvalidInputError
from palimpsest.files.storage import open_regular
from palimpsest.runs.journal import note
from palimpsest.scoring import Score, score
from palimpsest.scoring.scores import check_apart

BATCH = 64  # images that a network sees at once


@dataclass(frozen=True)
class Truth:
    """The training images (n, C, H, W) in [0, 1], their classes 0…C−1, and images that were held out.

    The network saw (images − mean) / std.

    Args:
        images: the training images.
        labels: (n,) their classes.
        held_out: images of the same kind that were not trained on. The verdict of a comparison needs them.
        mean: the number or image that was subtracted before training.
        std: the number or image that was divided by.
        classes: the names of the classes, in the order of their numbers.
        sources: the files or folders of the training and of the held-out images, if they were read from any.
        names: the names of the images' files, if they have any.

    Examples:
        >>> black_and_white = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
        >>> Truth(black_and_white, torch.tensor([0, 1]), mean=0.5, std=0.25).seen.unique()
        tensor([-2.,  2.])
    """

    images: Tensor
    labels: Tensor
    held_out: Tensor | None = None
    mean: Tensor | float = 0.0
    std: Tensor | float = 1.0
    classes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for i, first in enumerate(_firsts(self.images)):
            if first < i:  # one leak would count twice
                raise InvalidInputError(f"training image {i + 1} equals training image {first + 1}; give each once")
        if self.held_out is not None:
            check_apart(self.images, self.held_out)

    @property
    def seen(self) -> Tensor:
        """The training images as the network saw them."""
        return (self.images - self.mean) / self.std

    def score(self, candidates: Tensor, *, looks: int = 1) -> Score:
        """Score candidates, as the network sees images, against the training images.

        They are scaled by one deviation per channel. A deviation per pixel holds a trace of the training images, so
        even noise multiplied by it resembles them.
        """
        shape = tuple(self.images.shape[1:])
        mean, std = (torch.as_tensor(value, dtype=torch.float32).expand(shape) for value in (self.mean, self.std))
        shown = candidates.cpu() * std.mean((1, 2), keepdim=True)
        return score(shown, self.images, held_out=self.held_out, mean=mean, looks=looks)

    def outputs(
        self, model: nn.Module, *, mean: Tensor | float | None = None, std: Tensor | float | None = None
    ) -> Tensor:
        """(n, outputs) of the training images, by default at the mean and deviation of training."""
        mean, std = (self.mean if mean is None else mean), (self.std if std is None else std)
        like = next(model.parameters())
        with torch.no_grad():
            parts = [model(((x - mean) / std).to(like)).reshape(len(x), -1).cpu() for x in self.images.split(BATCH)]
        return torch.cat(parts)

    def accuracy(self, model: nn.Module) -> float:
        """Share of the training images that the network classifies correctly."""
        outputs = self.outputs(model)
        return accuracy(outputs, self.labels_for(outputs.shape[1]))

    def majority(self, outputs: int) -> float:
        """Share of the commonest class: the accuracy of a constant answer."""
        return float(self.labels_for(outputs).unique(return_counts=True)[1].max() / len(self.labels))

    def labels_for(self, outputs: int) -> Tensor:
        """±1 for one output, classes for several."""
        return 2 * (self.labels > 0).long() - 1 if outputs == 1 else self.labels


def accuracy(outputs: Tensor, labels: Tensor, *, either_way: bool = True) -> float:
    """Share of images that are classified correctly.

    One output separates two classes by its best threshold, because it need not be 0. It may do so in either direction.
    """
    if outputs.shape[1] > 1:
        return float((outputs.argmax(1) == labels).double().mean())
    levels, place = outputs[:, 0].unique(return_inverse=True)  # every threshold that matters, ascending
    high, low = (torch.bincount(place[group], minlength=len(levels)) for group in (labels > 0, labels <= 0))
    below = low.cumsum(0) - low
    right = (high.sum() - (high.cumsum(0) - high) + below) / len(labels)  # high at or above it, and low below
    return float(torch.stack([right, 1 - right]).max() if either_way else right.max())


def load(images: str, held_out: str | None, *, mean: str, std: str, image_shape: tuple[int, ...]) -> Truth:
    """Read training images, and held-out images: each a folder with a sub-folder per class, or an .npz file."""
    centre, deviation = scale(mean, std, image_shape)
    source = _source(images, image_shape)
    other = None if held_out is None else unit(_source(held_out, image_shape).images)
    shown, labels = unit(source.images), torch.from_numpy(source.labels.astype(np.int64))
    firsts = _firsts(shown)
    kept = [i for i, first in enumerate(firsts) if i == first]
    if copies := len(shown) - len(kept):
        note(f"{copies} of {len(shown)} training images equal another one; each counts once")
    same: dict[int, list[str]] = {}
    for name, first in zip(source.names, firsts, strict=False):  # arrays do not have names
        same.setdefault(first, []).append(name)
    names = tuple(" = ".join(each) for each in same.values())
    sources = (images,) if held_out is None else (images, held_out)
    return Truth(shown[kept], labels[kept], other, centre, deviation, source.classes, sources, names)


def _firsts(images: Tensor) -> list[int]:
    """For each image the number of the first one that equals it."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault((image + 0.0).cpu().numpy().tobytes(), i) for i, image in enumerate(images)]  # −0 is 0


def scale(mean: str, std: str, image_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation that a user gave."""
    centre, deviation = (numbers(text, image_shape) for text in (mean, std))
    if not bool((deviation > 0).all() and deviation.isfinite().all()):
        raise InvalidInputError(f"the standard deviation is {std}; give positive numbers")
    return centre, deviation


def numbers(text: str, image_shape: tuple[int, ...]) -> Tensor:
    """A number, one per channel (0.5,0.4,0.4), or an image in an .npy file, as a (C, H, W) tensor."""
    try:
        if text.endswith(".npy"):
            with open_regular(text, follow=True) as file:
                values = torch.from_numpy(np.load(file, allow_pickle=False)).float()
        else:
            values = torch.tensor([float(part) for part in text.split(",")]).view(-1, 1, 1)
        return values.expand(image_shape).clone()
    except (ValueError, OSError, RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"{text!r} does not fit {image_shape} images; give a number, one per channel, or an .npy file"
        ) from error


def _source(name: str, image_shape: tuple[int, ...]) -> Source:
    path = existing(name)
    source = folder.read(path) if path.is_dir() else arrays.read(path)
    return replace(source, images=fitting(source.images, name, image_shape))


def existing(name: str) -> Path:
    """The folder or file that a user named."""
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError(f"there is no {name}; give a folder with a sub-folder of images per class, or an .npz file")
    return path


def fitting(images: np.ndarray, name: str, image_shape: tuple[int, ...]) -> np.ndarray:
    """Images as the network sees them, refused if they have another size."""
    images = _with_channels(images, image_shape[0])
    if (shape := images.shape[1:]) != image_shape:
        remedy = f"give --shape {','.join(map(str, shape))}, or resize them"
        if shape[1:] == image_shape[1:]:
            remedy = "save them in grey" if shape[0] == 3 else "check --shape"
        raise DataError(f"the images of {name} are {shape} but the network sees {image_shape}; {remedy}")
    return images


def _with_channels(images: np.ndarray, channels: int) -> np.ndarray:
    """Grey images for a network that sees colour, and the reverse if all channels are equal."""
    if images.shape[1] == 1:
        return np.repeat(images, channels, axis=1)
    return images[:, :channels] if (images == images[:, :1]).all() else images
