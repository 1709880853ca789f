"""What `palimpsest reproduce` does: run the parts that are missing, and sum up those that are there."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from palimpsest.errors import DivergenceError, InvalidInputError, PalimpsestError, ResourceError
from palimpsest.reproduce import experiment, scoreboard, summary
from palimpsest.reproduce.experiment import Experiment
from palimpsest.reproduce.runner import Part, Result, Runner, Selection

ENDED = "a process was ended, perhaps for lack of memory; give the same command again, or fewer --workers"


@dataclass(frozen=True)
class Options:
    """Which experiments, which parts of them, and how."""

    names: tuple[str, ...]
    """Experiments: names, all, or your own .toml files (docs/own-experiments.md lists their keys)."""
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
    workers: int = 1
    """Processes side by side, each with one seed of an experiment at a time; on a GPU, its multi-process service lets
    them share it rather than take turns. On CPUs each has its share of the cores, and rounds as so many threads do."""
    missing: bool = False
    """Run only what the documents (--docs) lack too; they hold nothing with --small or --tuning, or of your own."""
    summarise: bool = False
    """Run nothing; add all parts that are there to the documents (--docs), not beside the parts as a run does."""
    out: Path = Path("runs/reproduce")
    """Where parts are kept."""
    docs: Path = Path("docs")
    """Results, figures and scoreboard of the experiments that come with Palimpsest, to which --summarise adds what was
    run with neither --small nor --tuning; all else stays beside its parts."""
    data_root: Path | None = None
    """Where MNIST and CIFAR-10 files are; also the environment variable PALIMPSEST_DATA."""


def reproduce(options: Options) -> None:
    """Run the experiments that are asked for, in that order, and sum them up."""
    names = dict.fromkeys(n for name in options.names for n in (experiment.names() if name == "all" else [name]))
    if not names:
        raise InvalidInputError(f"name an experiment: {', '.join(experiment.names())}, or all")
    if options.workers < 1:
        raise InvalidInputError(f"workers are {options.workers}; give one or more")
    runners = {name: _runner(name, options) for name in names}
    if len({runner.folder for runner in runners.values()}) < len(runners):
        raise InvalidInputError("two files of one name would keep their parts in one folder; rename one")
    if options.summarise and options.missing:
        raise InvalidInputError("--missing runs parts and --summarise does not; give one after the other")
    if options.summarise and any(vars(_selection(options)).values()):
        raise InvalidInputError("--summarise sums up all parts that are there; give no columns, variants or numbers")
    if options.summarise:
        _sum_up(runners.values(), options)
    else:
        _run_all(runners, options)
        beside = [_runner(name, replace(options, missing=False)) for name in names]
        _sum_up([runner for runner in beside if runner.results()], options)


def _run_all(runners: dict[str, Runner], options: Options) -> None:
    _refuse_what_there_is_not(options, [part for runner in runners.values() for part in runner.parts()])
    parts = {name: runner.parts(_selection(options)) for name, runner in runners.items()}
    ends = math.inf if options.budget is None else time.monotonic() + options.budget
    if options.workers == 1:
        for name in filter(parts.get, runners):
            _run(runners[name], options, ends)
    else:
        seeds = {name: dict.fromkeys(part.seed for part in parts[name]) for name in runners}
        _side_by_side([(name, replace(options, seed=(seed,)), ends) for name in runners for seed in seeds[name]])


def _runner(name: str, options: Options) -> Runner:
    loaded = experiment.load(name, small=options.small)
    if unknown := {goal.measure for goal in loaded.goals} - set(summary.MEASURED):
        raise InvalidInputError(f"{name} aims at {min(unknown)!r}; choose from {', '.join(summary.MEASURED)}")
    suffix = "-small" * options.small + "-tuning" * options.tuning
    counts = _is_documented(loaded, options) and (options.missing or options.summarise)
    return Runner(
        loaded,
        options.out / (loaded.name + suffix),
        tuning=options.tuning,
        data_root=options.data_root,
        known=summary.known(options.docs / "results" / f"{loaded.name}.json") if counts else None,
    )


def _is_documented(loaded: Experiment, options: Options) -> bool:
    return loaded.called in experiment.names() and not options.small and not options.tuning


def _selection(options: Options) -> Selection:
    return Selection(options.column, options.variant, options.candidates, options.seed)


# --- several processes --------------------------------------------------------------------------

Lane = tuple[str, Options, float]  # an experiment, one of its seeds, and when to end


def _side_by_side(lanes: list[Lane]) -> None:
    """Seeds in processes of their own: each trains its network once, and no two want the same part."""
    workers = min(lanes[0][1].workers, len(lanes))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_share, initargs=(workers,)) as pool:
        try:
            for ended in as_completed([pool.submit(_run_aside, *lane) for lane in lanes]):
                ended.result()
        except BaseException as error:  # parts are written whole, so that those which run can be ended at any time
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ResourceError(ENDED) from error
            raise


def _share(workers: int) -> None:
    """What a process beside others does first."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup and `&` ask for Ctrl-C to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _end_with_the_first() -> None:
    """Wait for the process that began this one to end, however it does, and go with it."""
    first = parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


def _run_aside(name: str, options: Options, ends: float) -> None:
    try:
        _run(_runner(name, options), options, ends)
    except PalimpsestError as error:  # as one that can be sent from process to process
        raise PalimpsestError(f"{name}, seed {options.seed[0]}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise ResourceError(ENDED) from None


# --- one process --------------------------------------------------------------------------------


def _run(runner: Runner, options: Options, ends: float) -> None:
    parts = runner.parts(_selection(options))
    name = ", seed ".join([runner.experiment.name, *map(str, options.seed)])
    missing = [part for part in parts if runner.done(part) is None]
    print(f"{name}: {len(parts) - len(missing)} of {len(parts)} parts are there", flush=True)
    if runner.device.type == "cuda":
        torch.compiler.reset()  # each experiment compiles for its own settings, and torch keeps only so many
    for number, part in enumerate(missing, 1):
        if time.monotonic() + _expected(runner, part) > ends:
            print(
                f"{name}: parts left: {len(missing) - number + 1}; give the same command again, or more seconds",
                flush=True,
            )
            return
        try:
            line = _line(runner.result(part))
        except DivergenceError as error:  # one part's failure is no reason to leave the others undone
            line = str(error)
        print(f"  {runner.experiment.name} {number}/{len(missing)} {part.name}: {line}", flush=True)


def _expected(runner: Runner, part: Part) -> float:
    """Seconds that a part may take: those of the longest that was done of its column."""
    done = map(runner.done, runner.parts(Selection(column=(part.column,))))
    return max((result["seconds"] for result in done if result), default=0.0)


def _refuse_what_there_is_not(options: Options, parts: list[Part]) -> None:
    """A selection must be one of parts that there are."""
    wanted = {f.name: getattr(options, f.name) for f in fields(Part)}
    there = {name: dict.fromkeys(getattr(part, name) for part in parts) for name in wanted}
    choices = "; ".join(f"{name}: {', '.join(map(str, them))}" for name, them in there.items())
    for name, values in wanted.items():
        for value in values:
            if value not in there[name]:
                raise InvalidInputError(f"no part has the {name} {value}; choose from {choices}")
    if not any(part in _selection(options) for part in parts):
        raise InvalidInputError(f"no part has all that was asked for; choose from {choices}")


def _line(result: dict[str, Any]) -> str:
    measured = {name: measure(result) for name, measure in summary.MEASURES.items()}
    shown = ("mean SSIM", "above 0.4", "above 0.9", "mean L2", "loss", "seconds")
    return ", ".join(f"{name} {measured[name]:.3g}" for name in shown)


# --- summing up ---------------------------------------------------------------------------------


def _sum_up(runners: Collection[Runner], options: Options) -> None:
    """Results and figures of every experiment, and a page for each folder that they are in."""
    given = " --small" * options.small + " --tuning" * options.tuning
    folders = {runner: _folder(runner, options) for runner in runners}
    for runner, folder in folders.items():
        _refuse_to_lose(runner, folder)
        if not runner.results():
            name = runner.experiment.name
            raise InvalidInputError(
                f"{runner.folder} has no part of {name} as it is asked for now; run it without --summarise first"
            )
    for runner, folder in folders.items():
        summary.write(runner, folder / "results", given)
    for folder in dict.fromkeys(folders.values()):
        page = scoreboard.write(folder, documents=folder == options.docs)
        print(f"Results and figures: {page}", flush=True)


def _folder(runner: Runner, options: Options) -> Path:
    """Where to sum up: in the documents, if that is asked for and the experiment is of theirs, or beside its parts."""
    return options.docs if options.summarise and _is_documented(runner.experiment, options) else runner.folder


def _refuse_to_lose(runner: Runner, folder: Path) -> None:
    """Parts that the documents hold stay there as they are, unless someone takes them out."""
    results = runner.results()
    if lost := [part.name for part, known in runner.known.items() if not _stays(known, results.get(part))]:
        path = folder / "results" / f"{runner.experiment.name}.json"
        raise InvalidInputError(
            f"{len(lost)} of the parts in {path}, as {lost[0]}, are no longer asked for, or came out otherwise in"
            f" {runner.folder}; take their lines out of that file first"
        )


def _stays(known: Result, result: Result | None) -> bool:
    return result is not None and all(result[name] == known.get(name) for name in ("asked", "ssim", "l2"))
