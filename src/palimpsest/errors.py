"""Everything that can go wrong by a user's doing, by name.

Each message is one sentence that says what is wrong and what to do about it.
"""

from __future__ import annotations


class PalimpsestError(Exception):
    """Base of every error that Palimpsest raises on purpose."""


class InvalidInputError(PalimpsestError, ValueError):
    """Shapes, labels, counts or options that do not fit together."""


class NonFiniteError(InvalidInputError):
    """Weights or data that contain NaN or infinity."""


class WeightsError(InvalidInputError):
    """A file of weights that is not safe to read, is damaged, or does not fit the network."""


class UnsupportedNetworkError(PalimpsestError):
    """A network that cannot be differentiated as the method needs, with the layer and the remedy."""

    def __init__(self, layer: str, reason: str) -> None:
        self.layer = layer
        super().__init__(f"layer {layer or '(the network itself)'!s} {reason}")


class NoGradientError(PalimpsestError):
    """No parameter receives a gradient, so the weights carry no trace of the data."""


class DivergenceError(PalimpsestError):
    """The optimisation left the finite numbers."""

    def __init__(self, step: int, advice: str) -> None:
        self.step = step
        super().__init__(f"the reconstruction became non-finite at step {step}; {advice}")


class CheckpointError(PalimpsestError):
    """A saved state that cannot be read, or belongs to another problem."""


class DataError(PalimpsestError):
    """Data files that are missing, damaged, or too few for what was asked."""


class TrainingDivergedError(PalimpsestError):
    """Training left the finite numbers."""

    def __init__(self, step: int, advice: str) -> None:
        self.step = step
        super().__init__(f"training became non-finite at step {step}; {advice}")


class RunFolderError(PalimpsestError):
    """A run folder that is missing, in use, of another version, or damaged."""


class StorageError(PalimpsestError, OSError):
    """A file that could not be read or written; what stood there before is intact."""


class ResourceError(PalimpsestError):
    """Work that would not fit into the memory or onto the disk, refused before it begins."""


class NoCounterexampleError(PalimpsestError):
    """No other data set was found that gives the same weights, which proves nothing."""
