"""Your own arrays: an ``.npz`` file with ``images`` and ``labels``."""

import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from palimpsest.datasets import files
from palimpsest.datasets.base import Source
from palimpsest.errors import DataError
from palimpsest.files.storage import open_regular

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
LIMIT = 1 << 30  # bytes of one array, many times the size of a dataset of small images
SUSPICIOUS, RATIO = 1 << 26, 100  # images of 64 MiB do not compress a hundredfold


def read(path: Path) -> Source:
    """Images ``(N, H, W)``, ``(N, C, H, W)`` or ``(N, H, W, C)``, bytes or in [0, 1]; whole labels."""
    images, labels = _arrays(path, "images", "labels")
    images = _channels_first(path, images)
    _check_labels(path, images, labels)
    values, indices = np.unique(labels, return_inverse=True)
    if len(values) < 2:
        raise DataError(f"{path} has {len(values)} class(es); give images of at least two classes")
    return Source.of_two(images, indices.astype(np.int64), tuple(str(v) for v in values.tolist()))


def read_unlabelled(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The images as `read` returns them, and their labels as they are, if the file has any."""
    images, *labels = _arrays(path, "images", optional=("labels",))
    images = _channels_first(path, images)
    for given in labels:
        _check_labels(path, images, given)
    return images, labels[0] if labels else None


def _check_labels(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    if labels.shape != (len(images),) or labels.dtype.kind not in "iub":
        raise DataError(f"{path} has other labels than one whole number per image; give shape ({len(images)},)")


def _arrays(path: Path, *names: str, optional: tuple[str, ...] = ()) -> list[np.ndarray]:
    try:
        with files.reading(path), open_regular(path, follow=True) as file, zipfile.ZipFile(file) as archive:
            present = [name for name in optional if f"{name}.npy" in archive.namelist()]
            return [_array(archive, path, name) for name in (*names, *present)]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # the last two if it is encrypted
        raise DataError(f"{path} is not a readable .npz file; write it again with numpy.savez") from error


def _array(archive: zipfile.ZipFile, path: Path, name: str) -> np.ndarray:
    """One array, refused unless the content has exactly the size that its header announces."""
    if f"{name}.npy" not in archive.namelist():
        raise DataError(f"{path} does not contain an array {name!r}; save it with {name}=...")
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as stream:
        try:
            shape, fortran, dtype = HEADERS[npy.read_magic(stream)](stream)
        except Exception as error:  # numpy parses the header as Python, which can raise anything
            raise DataError(f"{path} has an unreadable array {name!r}; write it again") from error
        if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0:
            raise DataError(f"{path} has an array {name!r} of another kind than numbers; save plain numbers")
        announced = math.prod(shape) * dtype.itemsize
        if announced > SUSPICIOUS and announced > RATIO * member.compress_size:
            raise DataError(f"{path} expands {name!r} more than images do; write it again with numpy.savez")
        content = files.read_announced(stream, announced, limit=LIMIT, what=f"{path}:{name}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _channels_first(path: Path, images: np.ndarray) -> np.ndarray:
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4:
        raise DataError(f"{path} has images of shape {images.shape}; give (N, H, W) or (N, C, H, W)")
    if images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = np.moveaxis(images, 3, 1)
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f" or not np.all((images >= 0) & (images <= 1)):  # NaN fails both comparisons
        raise DataError(f"{path} has images outside [0, 1]; save bytes, or floating-point numbers in [0, 1]")
    return images
