"""Images to train on and images held out: data sets that ship with dependencies, official files, your own.

A data set is one short file with one function that returns a `Source`, decorated by its name; importing the
file below is all it takes for `load` to know it.
"""

from palimpsest.datasets import cifar10, digits, faces, mnist
from palimpsest.datasets.base import DataSet, Part, Source, load, names, register

__all__ = ["DataSet", "Part", "Source", "cifar10", "digits", "faces", "load", "mnist", "names", "register"]
