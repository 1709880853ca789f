"""Your own folder: one sub-folder per class, PNG or JPEG images of one size."""

import warnings
from pathlib import Path

import numpy as np

from palimpsest.datasets import files
from palimpsest.datasets.base import Source
from palimpsest.errors import DataError
from palimpsest.files.storage import open_regular

SUFFIXES = (".png", ".jpg", ".jpeg")
GREY = ("1", "L")
MOST_PIXELS = 1 << 24  # of one image, checked before decoding
COLOUR = ("RGB", "RGBA", "P", "CMYK", "YCbCr", "LA", "PA")


def read(root: Path) -> Source:
    """Every image below ``root``, classes in alphabetical order. They are grey only if all images are grey."""
    folders = [path for path in _entries(root) if path.is_dir()]
    if len(folders) < 2:
        raise DataError(f"{root} has {len(folders)} sub-folder(s); make one per class, at least two")
    paths: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        inside = [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES]
        if not inside:
            raise DataError(f"{folder} does not contain PNG or JPEG images; add some or remove the folder")
        paths += inside
        labels += [label] * len(inside)
    names = tuple(f"{path.parent.name}/{path.name}" for path in paths)
    return Source.of_two(_images(paths), np.array(labels), tuple(folder.name for folder in folders), names)


def read_unlabelled(root: Path) -> tuple[np.ndarray, list[str]]:
    """Every image in ``root`` and in its sub-folders, and its path there, in alphabetical order."""
    entries = [inner for path in _entries(root) for inner in (_entries(path) if path.is_dir() else [path])]
    paths = [path for path in entries if path.suffix.lower() in SUFFIXES]
    if not paths:
        raise DataError(f"{root} does not contain PNG or JPEG images; add some, in the folder or one level below")
    return _images(paths), [path.relative_to(root).as_posix() for path in paths]


def _images(paths: list[Path]) -> np.ndarray:
    """(N, C, H, W), grey only if all images are grey."""
    images: list[np.ndarray] = []
    for path in paths:
        image = _read_image(path)
        if images and image.shape[:2] != images[0].shape[:2]:
            raise DataError(f"{path} has another size than the images before it; scale all to one size")
        images.append(image)
    grey = all(image.ndim == 2 for image in images)
    return np.stack([image[None] if grey else _colour(image) for image in images])


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder without hidden files."""
    with files.reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _colour(image: np.ndarray) -> np.ndarray:
    return np.stack([image] * 3) if image.ndim == 2 else image.transpose(2, 0, 1)


def _read_image(path: Path) -> np.ndarray:
    """Bytes, ``(H, W)`` for grey images and ``(H, W, 3)`` for the others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # read what is odd but readable
            mode, pixels = _decoded(path)
    except DataError:
        raise
    except Exception as error:  # decoders can raise anything on damaged bytes
        raise DataError(f"{path} is not a readable PNG or JPEG image; replace or remove it") from error
    if mode not in GREY + COLOUR:
        raise DataError(f"{path} has pixels of kind {mode!r}; save it with 8 bits per channel")
    return pixels


def _decoded(path: Path) -> tuple[str, np.ndarray]:
    """Pillow's mode of the image, and its bytes."""
    from PIL import Image

    with open_regular(path, follow=True) as file, Image.open(file, formats=("PNG", "JPEG")) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise DataError(f"{path} has {width}×{height} pixels; scale the images to the network's input size")
        image.verify()  # checks more than decoding does, but leaves the file unusable
    with open_regular(path, follow=True) as file, Image.open(file, formats=("PNG", "JPEG")) as image:
        return image.mode, np.array(image.convert("L" if image.mode in GREY else "RGB"))
