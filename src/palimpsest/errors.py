"""Every error that a user can cause, by name. A message is one sentence that says what is wrong and what to do."""

from collections.abc import Mapping
from typing import Any


class PalimpsestError(Exception):
    """Base of every error that Palimpsest raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), self.args, vars(self))  # the usual way repeats __init__ with the sentence alone


def _received(kind: type[PalimpsestError], sentence: tuple[Any, ...], details: Mapping[str, Any]) -> PalimpsestError:
    """An error that another process raised."""
    error = kind.__new__(kind, *sentence)
    vars(error).update(details)
    return error


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

    work = "the reconstruction"

    def __init__(self, step: int, advice: str) -> None:
        self.step = step
        super().__init__(f"{self.work} became non-finite at step {step}; {advice}")


class CheckpointError(PalimpsestError):
    """A saved state that cannot be read, or belongs to another problem."""


class ProcessEndedError(PalimpsestError):
    """A reconstruction on several processes was stopped, or another of its processes ended."""

    def __init__(self) -> None:
        super().__init__("stopped, or another process ended; run it again to continue from its checkpoint")


class DataError(PalimpsestError):
    """Data files that are missing, damaged, or too few."""


class TrainingDivergedError(DivergenceError):
    """Training left the finite numbers."""

    work = "training"


class RunFolderError(PalimpsestError):
    """A run folder that is missing, in use, of another version, or damaged."""


class StorageError(PalimpsestError, OSError):
    """A file that could not be read or written; its earlier content is intact."""


class ResourceError(PalimpsestError):
    """Work that needs more memory or disk than there is; it is refused before it begins."""


class WorkerLostError(PalimpsestError):
    """A part whose process or machine died."""


class NoAnswerError(PalimpsestError):
    """Workers that did not finish their parts in time."""
