"""Palimpsest: how much of the training set can be read back out of a network's weights?"""

from palimpsest import errors, networks, optimisers, priors, splitting, storage
from palimpsest.callbacks import Callback
from palimpsest.certificate import certify
from palimpsest.first_layer import span
from palimpsest.objectives import KKT, NTK, MulticlassKKT
from palimpsest.parametrisation import Subspace
from palimpsest.reconstruction import Reconstruction, reconstruct
from palimpsest.splitting import Splitting

__version__ = "0.1.0"
__all__ = [
    "KKT",
    "NTK",
    "Callback",
    "MulticlassKKT",
    "Reconstruction",
    "Splitting",
    "Subspace",
    "__version__",
    "certify",
    "errors",
    "networks",
    "optimisers",
    "priors",
    "reconstruct",
    "span",
    "splitting",
    "storage",
]
