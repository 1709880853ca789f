"""Palimpsest: how much of the training set can be read back out of a network's weights?

Names are loaded on first use, so that ``import palimpsest`` needs torch, numpy and scipy only.
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

from palimpsest.first_layer import span

if TYPE_CHECKING:
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
    from palimpsest.auditing.audit import audit
    from palimpsest.callbacks import Callback
    from palimpsest.certificate import certify
    from palimpsest.execution import Execution
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

_HOME = {  # the module of each name that is not itself a module; the imports above tell type checkers the same
    "KKT": "objectives",
    "NTK": "objectives",
    "Callback": "callbacks",
    "Execution": "execution",
    "Merging": "merging",
    "MulticlassKKT": "objectives",
    "Reconstruction": "reconstruction",
    "Splitting": "splitting",
    "Subspace": "parametrisation",
    "audit": "auditing.audit",
    "certify": "certificate",
    "identify": "identifiability",
    "reconstruct": "reconstruction",
    "score": "scoring",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        value = import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
