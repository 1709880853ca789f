"""The parts of an experiment, and the files that hold their results: one JSON file for each part."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palimpsest.errors import InvalidInputError
from palimpsest.files.storage import write_atomically
from reproduce.experiment import VARIANTS, Experiment

PICTURED = ("none", "splitting", "merging")  # the variants in the figures
NEEDED = {"device", "seconds", "loss", "final candidates", "candidate-steps", "splits", "recovered", "training", "l2"}


@dataclass(frozen=True)
class Part:
    """One reconstruction of an experiment."""

    column: str
    variant: str
    candidates: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.column}-{self.variant}-k{self.candidates}-seed{self.seed}"

    @property
    def options(self) -> str:
        """Those of the command line that select this part.

        >>> Part("ours", "none", 60, 0).options
        '--column ours --variant none --candidates 60 --seed 0'
        """
        return " ".join(f"--{name} {value}" for name, value in asdict(self).items())


Result = dict[str, Any]
Results = dict[Part, Result]


@dataclass(frozen=True)
class Selection:
    """Selects the parts with these values. An empty field selects every value."""

    column: Collection[str] = ()
    variant: Collection[str] = ()
    candidates: Collection[int] = ()
    seed: Collection[int] = ()

    def __contains__(self, part: Part) -> bool:
        return all(not wanted or getattr(part, name) in wanted for name, wanted in vars(self).items())


def of(experiment: Experiment) -> Iterator[Part]:
    """All parts: first those without and with splitting, for all seeds, then the controls."""
    for variant in VARIANTS:
        for seed in experiment.seeds:
            for name, column in experiment.columns.items():
                if variant in column.variants:
                    yield from (Part(name, variant, k, seed) for k in column.candidates)


def path(folder: Path, part: Part) -> Path:
    return folder / f"{part.name}.json"


def write(folder: Path, part: Part, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(part) | result, separators=(",", ":")) + "\n"
    write_atomically(path(folder, part), text.encode())


def read(folder: Path, experiment: Experiment) -> Results:
    """The results of all parts whose files are in the folder."""
    files = {part: file for part in of(experiment) if (file := path(folder, part)).is_file()}
    return {part: _read(file, part, experiment.training.images) for part, file in files.items()}


def _read(file: Path, part: Part, images: int) -> Result:
    try:
        result = json.loads(file.read_bytes())
        _check(result, part, images)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            f"{file} is not the result of this part ({error}); delete it and run it again"
        ) from error
    return result


def _check(result: Any, part: Part, images: int) -> None:
    """Raise a ValueError for a damaged file, or one that belongs to another part."""
    if not asdict(part).items() <= result.items():
        raise ValueError("it names another part")
    if missing := NEEDED - result.keys():
        raise ValueError(f"{min(missing)} is missing")
    for name in ("ssim", "l2", "held-out ssim"):
        scores = result.get(name, [])
        if len(scores) != images and not (scores and name.startswith("held-out")):
            raise ValueError(f"{name} does not have one number for each of {images} images")
        if not all(math.isfinite(score) for score in scores):
            raise ValueError(f"{name} is not finite")
    if not {"summary", "weights"} <= result["training"].keys():
        raise ValueError("the training is not described")
