"""Images to train on and held-out images: from datasets inside dependencies, official files, or your own files.

A dataset is one short file with one function, decorated by its name, that returns a `Source`. `load` knows the files
that are imported below.
"""

from palimpsest.datasets import cifar10, digits, faces, mnist
from palimpsest.datasets.base import DataSet, Part, Source, load, names, register

__all__ = ["DataSet", "Part", "Source", "cifar10", "digits", "faces", "load", "mnist", "names", "register"]
