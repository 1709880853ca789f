"""MNIST: handwritten digits, 28×28 and grey, from its official idx files."""

from pathlib import Path

import numpy as np

from palimpsest.datasets import files
from palimpsest.datasets.base import Source, register
from palimpsest.datasets.digits import CLASSES, ODD
from palimpsest.errors import DataError

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FOLDERS = (".", "raw", "mnist", "mnist/raw", "MNIST", "MNIST/raw")
PARTS = ("train", "t10k")
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
}


@register("mnist")
def read(root: Path | None) -> Source:
    """The 60,000 training images, or the test images if a folder has only those; odd digits are +1."""
    images_path, labels_path = _files(root) if root else files.download(MD5, mirrors=MIRRORS)
    images = files.read_idx(images_path, dimensions=3)
    labels = files.read_idx(labels_path, dimensions=1).astype(np.int64)
    if len(images) != len(labels):
        raise DataError(f"{images_path} and {labels_path} differ in length; use two files that belong together")
    if labels.max(initial=0) > 9:
        raise DataError(f"{labels_path} has labels above 9; use the official MNIST file")
    return Source(images[:, None], labels, CLASSES, positive=ODD, sides=("even", "odd"))


def _files(root: Path) -> tuple[Path, Path]:
    """The first part whose images are in the folder, the training part before the test part."""
    folders = [root / name for name in FOLDERS]
    for part in PARTS:
        stem = f"{part}-images-idx3-ubyte"
        if images := files.find(folders, f"{stem}.gz", stem):
            stem = f"{part}-labels-idx1-ubyte"
            if labels := files.find([images.parent], f"{stem}.gz", stem):
                return images, labels
            raise DataError(f"{stem}.gz is missing in {images.parent}; put it there")
    raise DataError(f"{root} does not contain {' and '.join(MD5)}; put them there, or omit the folder to download them")
