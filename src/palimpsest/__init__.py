"""Palimpsest: how much of the training set can be read back out of a network's weights?"""

from palimpsest import errors, networks, priors, splitting
from palimpsest.objectives import KKT, NTK, MulticlassKKT
from palimpsest.splitting import Splitting

__version__ = "0.1.0"
__all__ = ["KKT", "NTK", "MulticlassKKT", "Splitting", "__version__", "errors", "networks", "priors", "splitting"]
