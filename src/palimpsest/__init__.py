"""Palimpsest: how much of the training set can be read back out of a network's weights?

Names are loaded on first use, so that ``import palimpsest`` needs torch, numpy and scipy only.
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

from palimpsest.span import span

if TYPE_CHECKING:
    from palimpsest import auditing, datasets, errors, identifiability, networks, scoring
    from palimpsest.auditing.audit import audit
    from palimpsest.execution import Execution
    from palimpsest.files import storage, weights
    from palimpsest.identifiability import identify
    from palimpsest.methods import KKT, NTK, AdamPath, Gradient, MulticlassKKT, Path, moments, undo_adam
    from palimpsest.objectives.spaces import Cosines, Subspace
    from palimpsest.scoring import score
    from palimpsest.solver import merging, optimisers, priors, splitting
    from palimpsest.solver.callbacks import Callback
    from palimpsest.solver.merging import Merging
    from palimpsest.solver.reconstruction import Reconstruction, reconstruct
    from palimpsest.solver.splitting import Splitting
    from palimpsest.solver.stationarity import certify
    from palimpsest.training import train

__all__ = [
    "KKT", "NTK", "AdamPath", "Callback", "Cosines", "Execution", "Gradient", "Merging", "MulticlassKKT", "Path",
    "Reconstruction", "Splitting", "Subspace", "__version__", "audit", "auditing", "certify", "datasets", "errors",
    "identifiability", "identify", "merging", "moments", "networks", "optimisers", "priors", "reconstruct", "score",
    "scoring", "span", "splitting", "storage", "train", "undo_adam", "weights",
]  # fmt: skip

_HOME = {  # the module of each name that is not itself a module; the imports above tell type checkers the same
    "KKT": "methods", "NTK": "methods", "AdamPath": "methods", "Callback": "solver.callbacks",
    "Cosines": "objectives.spaces", "Execution": "execution", "Gradient": "methods", "Merging": "solver.merging",
    "MulticlassKKT": "methods", "Path": "methods", "Reconstruction": "solver.reconstruction",
    "Splitting": "solver.splitting", "Subspace": "objectives.spaces", "audit": "auditing.audit",
    "certify": "solver.stationarity", "identify": "identifiability", "moments": "methods",
    "reconstruct": "solver.reconstruction", "score": "scoring", "train": "training", "undo_adam": "methods",
}  # fmt: skip
_MODULES = {  # modules that are public under a shorter name
    "merging": "solver.merging", "optimisers": "solver.optimisers", "priors": "solver.priors",
    "splitting": "solver.splitting", "storage": "files.storage", "weights": "files.weights",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        value = import_module(f"{__name__}.{_MODULES.get(name, name)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
