"""What `palimpsest reproduce` does: run the parts that are missing, or sum up those that are there."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.reproduce import experiment, scoreboard, summary
from palimpsest.reproduce.runner import Part, Runner, Selection


@dataclass(frozen=True)
class Options:
    """Which experiments, which parts of them, and how."""

    names: tuple[str, ...]
    """Experiments: names, files of your own, or all."""
    column: tuple[str, ...] = ()
    """Only these columns: published, ours, path."""
    variant: tuple[str, ...] = ()
    """Only these variants: none, splitting, merging, restarts, random, duplicate, final-k, equal-compute."""
    candidates: tuple[int, ...] = ()
    """Only these numbers of candidates at the start."""
    seed: tuple[int, ...] = ()
    """Only these seeds."""
    small: bool = False
    """A small version on images that come with Palimpsest's dependencies: minutes on two cores."""
    tuning: bool = False
    """Use seeds 11 to 14, and only images that no reported seed trains on or holds out."""
    budget: float | None = None
    """Seconds after which no part should be running: none is started that would not end in time."""
    summarise: bool = False
    """Run nothing; write results, figures and the scoreboard from the parts that are there."""
    out: Path = Path("runs/reproduce")
    """Where parts are kept."""
    docs: Path = Path("docs")
    """Where results, figures and the scoreboard go; small and tuning runs keep theirs beside their parts."""
    data_root: Path | None = None
    """Where MNIST and CIFAR-10 files are; also the environment variable PALIMPSEST_DATA."""


class Budget:
    """Time that may be spent, and how long parts of a column have taken so far."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self._began = seconds, time.monotonic()
        self._longest: dict[str, float] = {}

    def allows(self, part: Part) -> bool:
        spent = time.monotonic() - self._began
        expected = self._longest.get(part.column, 0.0)
        return self.seconds is None or spent + expected <= self.seconds

    def note(self, part: Part, seconds: float) -> None:
        self._longest[part.column] = max(seconds, self._longest.get(part.column, 0.0))


def reproduce(options: Options) -> None:
    """Run or sum up the experiments that are asked for, in that order."""
    names = experiment.names() if options.names == ("all",) else options.names
    if not names:
        raise InvalidInputError(f"name an experiment: {', '.join(experiment.names())}, or all")
    runners = [_runner(name, options) for name in names]
    budget = Budget(options.budget)
    for runner in runners:
        if options.summarise:
            _summarise(runner, options)
        else:
            _run(runner, options, budget)


def _runner(name: str, options: Options) -> Runner:
    known = experiment.load(name, small=options.small)
    suffix = "-small" * options.small + "-tuning" * options.tuning
    return Runner(known, options.out / (known.name + suffix), tuning=options.tuning, data_root=options.data_root)


def _run(runner: Runner, options: Options, budget: Budget) -> None:
    name = runner.experiment.name
    parts = runner.parts(Selection(options.column, options.variant, options.candidates, options.seed))
    if not parts:
        raise InvalidInputError(f"no part of {name} is as asked for; {_choices(runner.parts())}")
    missing = [part for part in parts if runner.done(part) is None]
    print(f"{name}: {len(parts) - len(missing)} of {len(parts)} parts are there", flush=True)
    if runner.device.type == "cuda":
        torch.compiler.reset()  # each experiment compiles for its own settings, and torch keeps only so many
    for number, part in enumerate(missing, 1):
        if not budget.allows(part):
            print(f"{name}: {len(missing) - number + 1} parts are left; give the same command again", flush=True)
            return
        began = time.monotonic()
        try:
            line = _line(runner.result(part))
        except DivergenceError as error:  # one part's failure is no reason to leave the others undone
            line = str(error)
        budget.note(part, time.monotonic() - began)
        print(f"  {number}/{len(missing)} {part.name}: {line}", flush=True)


def _choices(parts: list[Part]) -> str:
    """What there is to select from, in words."""
    values = {f.name: dict.fromkeys(getattr(part, f.name) for part in parts) for f in fields(Part)}
    return "; ".join(f"{name}: {', '.join(map(str, them))}" for name, them in values.items())


def _line(result: dict[str, Any]) -> str:
    measured = {name: measure(result) for name, measure in summary.MEASURES.items()}
    shown = ("mean SSIM", "above 0.4", "above 0.9", "mean L2", "loss", "seconds")
    return ", ".join(f"{name} {measured[name]:.3g}" for name in shown)


def _summarise(runner: Runner, options: Options) -> None:
    given = " --small" * options.small + " --tuning" * options.tuning
    if not any(runner.done(part) for part in runner.parts()):
        name = runner.experiment.name
        raise InvalidInputError(f"there is nothing of {name} in {runner.folder}; run it without --summarise first")
    docs = runner.folder if given else options.docs
    page = summary.write(runner, docs / "results", given)
    scoreboard.write(docs)
    print(f"{runner.experiment.name}: {page} and {docs / 'scoreboard.md'}", flush=True)
