"""Palimpsest: how much of the training set can be read back out of a network's weights?"""

__version__ = "0.1.0"

from palimpsest import (
    auditing,
    datasets,
    errors,
    identifiability,
    merging,
    networks,
    optimisers,
    priors,
    scoring,
    splitting,
    storage,
    weights,
)
from palimpsest.auditing import audit
from palimpsest.callbacks import Callback
from palimpsest.certificate import certify
from palimpsest.execution import Execution
from palimpsest.first_layer import span
from palimpsest.identifiability import identify
from palimpsest.merging import Merging
from palimpsest.objectives import KKT, NTK, MulticlassKKT
from palimpsest.parametrisation import Subspace
from palimpsest.reconstruction import Reconstruction, reconstruct
from palimpsest.scoring import score
from palimpsest.splitting import Splitting
from palimpsest.training import train

__all__ = [
    "KKT",
    "NTK",
    "Callback",
    "Execution",
    "Merging",
    "MulticlassKKT",
    "Reconstruction",
    "Splitting",
    "Subspace",
    "__version__",
    "audit",
    "auditing",
    "certify",
    "datasets",
    "errors",
    "identifiability",
    "identify",
    "merging",
    "networks",
    "optimisers",
    "priors",
    "reconstruct",
    "score",
    "scoring",
    "span",
    "splitting",
    "storage",
    "train",
    "weights",
]
