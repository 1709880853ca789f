"""An experiment, as its TOML file describes it: networks to train, columns to compare, and goals."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import InvalidInputError
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.solver.optimisers import Adam
from palimpsest.training import LossName

FILES = Path(__file__).parent
TUNING_SEEDS = (11, 12, 13, 14)
VARIANTS = ("none", "splitting", "merging", "restarts", "random", "duplicate", "final-k", "equal-compute")
CONTROLS = ("restarts", "random", "duplicate", "final-k", "equal-compute")
PLAIN = ("none", "final-k", "equal-compute")  # variants that descend in one go
PRIORS = ("Box", "CentredBox", "MinimumMultiplier", "TotalVariation")
POLICIES = {  # the keys of these tables; the direction of splitting follows from the variant
    "splitting": tuple(f.name for f in fields(pal.Splitting) if f.name != "direction"),
    "merging": tuple(f.name for f in fields(pal.Merging)),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A network, trained on ``images`` images: half of each side, or a tenth of each class."""

    data: str
    images: int
    loss: LossName
    task: Literal["binary", "classes"] = "binary"
    hidden: tuple[int, ...] = (1000, 1000)
    scale: float | tuple[float, ...] = 1.0
    steps: int = 20_000
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if self.images < 1 or self.images % self._classes:
            raise TypeError(f"images is {self.images}, and not a multiple of the {self._classes} classes")

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

    candidates: tuple[int, ...]
    steps: int
    variants: tuple[str, ...]
    from_initial: bool = False
    """Read the change of the weights, for every loss, instead of the trained weights alone."""
    at: float | tuple[float, ...] = 1.0
    weights: Literal["equal", "auto"] = "equal"
    learning_rate: float = 0.02
    schedule: Literal["cosine", "constant"] = "cosine"
    sharpness: tuple[float, float]
    priors: dict[str, dict[str, float]]
    """Their options by name; `CentredBox` is the box around the mean that training subtracts."""
    prior_strength: tuple[float, float] = (1.0, 1.0)
    within: Literal["everything", "span"] = "everything"
    whitening: float = 0.0
    splitting: dict[str, Any]
    merging: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _refuse_unknown("the variant ", self.variants, VARIANTS)
        _refuse_unknown("the prior ", self.priors, PRIORS)
        for name, known in POLICIES.items():
            _refuse_unknown(f"{name}.", getattr(self, name) or (), known)
        if not self.candidates or min(self.steps, *self.candidates) < 1:
            raise TypeError(f"steps is {self.steps} and candidates is {list(self.candidates)}, and not one or more")
        for variant in self.variants:  # builds priors and policies, which check their own options
            self.settings(torch.zeros(1))
            self.policy(variant)

    def objective(self, model: nn.Module, initial: Mapping[str, Tensor], loss: LossName) -> Objective:
        weights: Literal["auto"] | None = "auto" if self.weights == "auto" else None
        if loss == "squared" or self.from_initial:
            return pal.NTK(model, initial, at=self.at, weights=weights, whitening=self.whitening)
        method = pal.KKT if loss == "logistic" else pal.MulticlassKKT
        return method(model, initial=initial, weights=weights)

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

    def subspace(self, model: nn.Module, initial: Mapping[str, Tensor]) -> Subspace | None:
        """The space in which candidates are searched, None for all images."""
        if self.within == "everything":
            return None
        found = pal.span(model, initial)
        if found.subspace is None:
            raise InvalidInputError(f"{found.reason}; let the column search within everything")
        return found.subspace

    def policy(self, variant: str) -> dict[str, Any]:
        """Options of `pal.reconstruct` in which a variant differs from the others."""
        if variant in PLAIN:
            return {}
        directions = {"random": "random", "duplicate": "duplicate", "splitting": "curvature", "merging": "curvature"}
        splitting = pal.Splitting(**self.splitting, direction=directions.get(variant, "none"))  # type: ignore[arg-type]
        return {"splitting": splitting} | (
            {"merging": pal.Merging(**self.merging or {})} if variant == "merging" else {}
        )


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A number that a row of the tables should reach."""

    column: str
    variant: str
    candidates: int
    measure: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise TypeError("a goal needs either at_least or at_most")


@dataclass(frozen=True, kw_only=True, eq=False)  # eq=False: a key of dictionaries
class Experiment:
    """The content of an experiment's file."""

    name: str = ""
    """That of the file, with `-small` or `-tuning` if the command says so."""
    command: str = ""
    """The command line that runs all parts."""
    apart_from: tuple[int, ...] = ()
    """Seeds whose images are not used."""
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

    def __post_init__(self) -> None:
        if not self.seeds:
            raise TypeError("seeds is empty")
        for goal in self.goals:
            _refuse_unknown("the column ", [goal.column], self.columns)
            column = self.columns[goal.column]
            if goal.variant not in column.variants or goal.candidates not in column.candidates:
                raise TypeError(f"no part of {goal.column} is {goal.variant} from {goal.candidates} candidates")


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
        smaller = table.pop("small", {})
        _refuse_another_kind("small", smaller, dict[str, Any])
        known: Experiment = _built(Experiment, _overlaid(table, smaller | {"goals": []}) if small else table)
    except RecursionError:
        raise InvalidInputError(f"{name} is based on itself; base it on another") from None
    except (TypeError, KeyError, AttributeError, InvalidInputError) as error:
        raise InvalidInputError(f"the experiment {name!r} is not well described ({error}); correct its file") from error
    return replace(
        known,
        name=Path(name).stem + "-small" * small + "-tuning" * tuning,
        command=f"python experiments/reproduce {shlex.quote(name)}" + " --small" * small + " --tuning" * tuning,
        title=f"{known.title} (small: {known.training.data})" if small else known.title,
        seeds=TUNING_SEEDS if tuning else known.seeds,
        apart_from=known.seeds if tuning else (),
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
    if "based_on" not in table:
        return table
    if not isinstance(base := table.pop("based_on"), str):
        raise InvalidInputError(f"{name} is based on {base!r}; give the name of an experiment, or a file.toml")
    under = _table(str(file.parent / base) if base.endswith(".toml") else base)
    return _overlaid({name: value for name, value in under.items() if name not in ("goals", "paper")}, table)


def _overlaid(below: Any, above: Any) -> Any:
    """Tables are merged key by key. Priors, policies and all other values are replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    whole = {name: value for name, value in above.items() if name in ("priors", "splitting", "merging")}
    return below | {name: _overlaid(below.get(name), value) for name, value in above.items()} | whole


def _built(kind: Any, value: Any) -> Any:
    """Turn tables into dataclasses and lists into tuples."""
    if kind in (Experiment, Training, Column, Goal):
        hints = get_type_hints(kind)
        _refuse_unknown("", value, keys(kind))
        if missing := {f.name for f in fields(kind) if f.default is MISSING} - value.keys():
            raise TypeError(f"{min(missing)} is missing")
        for name, given in value.items():
            _refuse_another_kind(name, given, hints[name])
        return kind(**{name: _built(hints[name], inner) for name, inner in value.items()})
    if kind == dict[str, Column]:
        return {name: _built(Column, each) for name, each in value.items()}
    if isinstance(value, list):
        return tuple(_built(Goal, each) if isinstance(each, dict) else each for each in value)
    return value


def keys(kind: type) -> tuple[str, ...]:
    """The keys of a table in a file.

    >>> keys(Goal)
    ('column', 'variant', 'candidates', 'measure', 'at_least', 'at_most')
    """
    names = tuple(f.name for f in fields(kind) if f.name not in ("name", "command", "apart_from"))
    return (*names, "based_on", "small") if kind is Experiment else names


def _refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := set(given) - set(known):
        raise TypeError(f"{what}{min(unknown)} is unknown; choose from {', '.join(known)}")


def _refuse_another_kind(name: str, given: Any, hint: Any) -> None:
    if not _fits(given, hint):
        raise TypeError(f"{name} is {given!r}, and not {_plainly(hint)}")


def _fits(given: Any, hint: Any) -> bool:
    """Whether a value from a TOML file fits an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return given in inner
    if origin is UnionType:
        return any(_fits(given, each) for each in inner)
    if origin is tuple:
        many = isinstance(given, list) and (inner[-1] is ... or len(given) == len(inner))
        return many and all(_fits(each, inner[0]) for each in given)
    if origin is dict:
        return isinstance(given, dict) and all(_fits(each, inner[1]) for each in given.values())
    if hint in (int, float):
        return isinstance(given, (int, hint)) and not isinstance(given, bool)
    return hint is Any or isinstance(given, dict if is_dataclass(hint) else hint)


def _plainly(hint: Any) -> str:
    """The meaning of an annotation, in TOML's words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(inner)
    if origin is UnionType:
        return " or ".join(_plainly(each) for each in inner if each is not NoneType)
    if origin is tuple:
        return f"a list, each {_plainly(inner[0])}"
    plain = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return plain.get(hint, "a table")
