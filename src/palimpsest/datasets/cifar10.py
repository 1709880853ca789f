"""CIFAR-10: photographs of ten kinds of things, 32×32 in colour, from its official binary files."""

from pathlib import Path

import numpy as np

from palimpsest.datasets import files
from palimpsest.datasets.base import Source, register
from palimpsest.errors import DataError

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
MD5 = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VEHICLES = frozenset({0, 1, 8, 9})
BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)
FOLDERS = (".", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # one byte of label, then the image
LIMIT = 10_000 * RECORD  # the official batches have 10,000 images each


@register("cifar10")
def read(root: Path | None) -> Source:
    """The training batches, or the test batch if a folder has only that; vehicles are +1, animals −1."""
    return _source(root, BATCHES)


@register("cifar10-test")
def read_test(root: Path | None) -> Source:
    """The test batch alone."""
    return _source(root, TEST)


def _source(root: Path | None, names: tuple[str, ...]) -> Source:
    parts = _parts(root, names) if root else _archive(files.download(MD5, mirrors=MIRRORS)[0], names)
    records = np.concatenate([_records(name, content) for name, content in parts])
    images = records[:, 1:].reshape(-1, *SHAPE)
    labels = records[:, 0].astype(np.int64)
    return Source(images, labels, CLASSES, positive=VEHICLES, sides=("animal", "vehicle"))


def _records(name: str, content: bytes) -> np.ndarray:
    if not content or len(content) % RECORD:
        raise DataError(f"{name} is truncated or not a CIFAR-10 batch; download it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() > 9:
        raise DataError(f"{name} has labels above 9; use the official binary version of CIFAR-10")
    return records


def _parts(root: Path, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    folders = [root / name for name in FOLDERS]
    found = [path for name in names if (path := files.find(folders, name))]
    if not found and (archive := files.find(folders, *MD5)):
        return _archive(archive, names)
    if not found and names != TEST:
        return _parts(root, TEST)
    if not found:
        raise DataError(f"{root} does not contain {names[0]} or {next(iter(MD5))}; put one there, or omit the folder")
    return [(str(path), files.read_bytes(path, limit=LIMIT)) for path in found]


def _archive(path: Path, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Batches inside the official archive, without unpacking it."""
    contents = files.read_members(path, [f"cifar-10-batches-bin/{name}" for name in names], limit=LIMIT)
    return [(f"{path}:{name}", content) for name, content in contents.items()]
