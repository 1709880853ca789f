"""An experiment, as its TOML file describes it: networks to train, columns to compare, and goals."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import InvalidInputError
from palimpsest.files import schema
from palimpsest.files.schema import Positive
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.runs.problems import METHODS, Within, problem
from palimpsest.solver.optimisers import Adam
from palimpsest.training import LossName

FILES = Path(__file__).parent
TUNING_SEEDS = (11, 12, 13, 14)
Variant = Literal["none", "splitting", "merging", "restarts", "random", "duplicate", "final-k", "equal-compute"]
PriorName = Literal["Box", "CentredBox", "MinimumMultiplier", "TotalVariation"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
CONTROLS = ("restarts", "random", "duplicate", "final-k", "equal-compute")
PLAIN = ("none", "final-k", "equal-compute")  # variants that descend in one go
DIRECTIONS = {"random": "random", "duplicate": "duplicate", "splitting": "curvature", "merging": "curvature"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A network, trained on ``images`` images: half of each side, or a tenth of each class."""

    data: str
    images: Positive
    loss: LossName
    task: Literal["binary", "classes"] = "binary"
    hidden: tuple[Positive, ...] = (1000, 1000)
    scale: float | tuple[float, ...] = 1.0
    steps: Positive = 20_000
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if self.images % self._classes:
            raise ValueError(f"images is {self.images}; give a multiple of the {self._classes} classes")

    @property
    def _classes(self) -> int:
        return 2 if self.task == "binary" else 10

    def load(self, seed: int, *, apart_from: Sequence[int] = (), data_root: Path | None = None) -> DataSet:
        return pal.datasets.load(
            self.data,
            per_class=self.images // self._classes,
            seed=seed,
            task=self.task,
            data_root=data_root,
            apart_from=apart_from,
        )

    def network(self, data: DataSet, seed: int) -> pal.networks.MLP:
        torch.manual_seed(seed)
        outputs = 1 if self.task == "binary" else len(data.classes)
        return pal.networks.MLP(data.image_shape, self.hidden, outputs, scale=self.scale)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One way to read the network, in every variant and from every number of candidates."""

    candidates: tuple[Positive, ...]
    steps: Positive
    variants: tuple[Variant, ...]
    from_initial: bool = False
    """Read the change of the weights, for every loss, instead of the trained weights alone."""
    at: float | tuple[float, ...] = 1.0
    weights: Literal["equal", "auto"] = "equal"
    learning_rate: float = 0.02
    schedule: Literal["cosine", "constant"] = "cosine"
    sharpness: tuple[float, float]
    priors: dict[PriorName, dict[str, float]]
    """Their options by name; `CentredBox` is the box around the mean that training subtracts."""
    prior_strength: tuple[float, float] = (1.0, 1.0)
    within: Within = "everywhere"
    whitening: float = 0.0
    splitting: pal.Splitting
    """Its direction follows from the variant."""
    merging: pal.Merging = field(default_factory=pal.Merging)

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("candidates is empty; give at least one number")
        if self.splitting.direction != "curvature":
            raise ValueError("splitting.direction follows from the variant; leave it out")
        self.settings(torch.zeros(1))  # priors check their own options

    def problem(
        self, model: nn.Module, initial: Mapping[str, Tensor], loss: LossName
    ) -> tuple[Objective, Subspace | None]:
        """The objective, and the space in which candidates are searched, None for all images."""
        return problem(
            "ntk" if self.from_initial else METHODS[loss],
            model,
            initial,
            at=self.at,
            weights="auto" if self.weights == "auto" else None,
            within=self.within,
            whitening=self.whitening,
        )

    def settings(self, mean: Tensor) -> dict[str, Any]:
        """Options of `pal.reconstruct` that all variants share; ``mean`` is the image that training subtracts."""
        known = vars(pal.priors) | {"CentredBox": partial(pal.priors.Box.around, mean)}
        return {
            "optimiser": Adam(learning_rate=self.learning_rate),
            "schedule": self.schedule,
            "sharpness": self.sharpness,
            "prior_strength": self.prior_strength,
            "priors": tuple(known[name](**options) for name, options in self.priors.items()),
        }

    def policy(self, variant: str) -> dict[str, Any]:
        """Options of `pal.reconstruct` in which a variant differs from the others."""
        if variant in PLAIN:
            return {}
        splitting = replace(self.splitting, direction=DIRECTIONS.get(variant, "none"))  # type: ignore[arg-type]
        return {"splitting": splitting} | ({"merging": self.merging} if variant == "merging" else {})


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A number that a row of the tables should reach."""

    column: str
    variant: Variant
    candidates: int
    measure: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a goal needs either at_least or at_most; give one of them")


@dataclass(frozen=True, kw_only=True, eq=False)  # eq=False: experiments are keys of dictionaries
class Description:
    """The content of an experiment's file."""

    based_on: str = ""
    title: str
    paper: str = ""
    """The paper's statement about it, in our words."""
    metric: Literal["ssim", "l2"]
    pictured: int
    """How many of the best images a figure shows."""
    seeds: tuple[int, ...]
    training: Training
    columns: dict[str, Column]
    goals: tuple[Goal, ...] = ()
    small: dict[str, Any] = field(default_factory=dict)
    """The changes that `--small` makes."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds is empty; give at least one number")
        for goal in self.goals:
            if goal.column not in self.columns:
                raise ValueError(
                    f"the column {goal.column} of a goal is unknown; choose from {', '.join(self.columns)}"
                )
            column = self.columns[goal.column]
            if goal.variant not in column.variants or goal.candidates not in column.candidates:
                raise ValueError(f"{goal.column} does not have a part {goal.variant} from {goal.candidates} candidates")


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment(Description):
    """A description with a name."""

    name: str
    """That of the file, with `-small` or `-tuning` if the command says so."""
    command: str
    """The command line that runs all parts."""
    apart_from: tuple[int, ...] = ()
    """Seeds whose images are not used."""


def names() -> tuple[str, ...]:
    """The experiments in this folder.

    >>> names()[:3]
    ('kkt-cifar10-100', 'kkt-cifar10-500', 'kkt-mnist-100')
    """
    return tuple(sorted(file.stem for file in FILES.glob("*.toml")))


def load(name: str, *, small: bool = False, tuning: bool = False) -> Experiment:
    """An experiment of this folder by its name, or any other by the path of its file.

    Args:
        small: use the version that takes minutes on two cores.
        tuning: use other seeds, and only images that no reported seed trains on or holds out.
    """
    if name not in names() and Path(name).stem in names():
        raise InvalidInputError(f"{name} has the name of one of the paper's experiments; rename the file")
    try:
        table = _table(name)
        if small and isinstance(changes := table.get("small", {}), dict):
            table = _overlaid(table, changes | {"goals": []})
        known = schema.built(Description, table)
    except RecursionError:
        raise InvalidInputError(f"{name} is based on itself; base it on another") from None
    except schema.FieldError as error:
        raise InvalidInputError(f"the experiment {name!r} is not well described ({error}); correct its file") from error
    return Experiment(
        **vars(known)
        | {
            "name": Path(name).stem + "-small" * small + "-tuning" * tuning,
            "command": f"python experiments/reproduce {shlex.quote(name)}" + " --small" * small + " --tuning" * tuning,
            "title": f"{known.title} (small: {known.training.data})" if small else known.title,
            "seeds": TUNING_SEEDS if tuning else known.seeds,
            "apart_from": known.seeds if tuning else (),
        }
    )


def _table(name: str) -> dict[str, Any]:
    """The content of a file, laid over the experiment that it is based on, without that one's goals and paper."""
    file = Path(name) if name.endswith(".toml") else FILES / f"{name}.toml"
    if not file.is_file():
        raise InvalidInputError(f"there is no file {file}; choose one of {', '.join(names())}, or give a file.toml")
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidInputError(f"{name} is not a TOML file ({error}); correct it") from error
    if not isinstance(base := table.get("based_on"), str):
        return table
    under = _table(str(file.parent / base) if base.endswith(".toml") else base)
    return _overlaid({name: value for name, value in under.items() if name not in ("goals", "paper")}, table)


def _overlaid(below: Any, above: Any) -> Any:
    """Tables are merged key by key. Priors, policies and all other values are replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    whole = {name: value for name, value in above.items() if name in ("priors", "splitting", "merging")}
    return below | {name: _overlaid(below.get(name), value) for name, value in above.items()} | whole
