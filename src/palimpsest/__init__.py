"""Palimpsest: how much of the training set can be read back out of a network's weights?"""

from palimpsest import errors, networks

__version__ = "0.1.0"
__all__ = ["__version__", "errors", "networks"]
