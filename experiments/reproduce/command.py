"""Runs the parts whose files are missing, and builds the pages."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import processes
import torch

from palimpsest.errors import DivergenceError, InvalidInputError, PalimpsestError
from palimpsest.execution.workers import completed
from palimpsest.files.storage import write_atomically
from reproduce import experiment, figures, pages, parts, summary
from reproduce.experiment import Experiment
from reproduce.parts import Part, Result, Selection
from reproduce.runner import Runner

ROOT = Path(__file__).parents[2]
RESULTS, DOCS, RUNS = ROOT / "experiments" / "results", ROOT / "docs" / "experiments", Path("runs/reproduce")


@dataclass(frozen=True)
class Job:
    """An experiment and the folders of its files."""

    experiment: Experiment
    results: Path
    scratch: Path
    pages: Path

    def runner(self, data_root: Path | None) -> Runner:
        return Runner(self.experiment, self.results, self.scratch, data_root)


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        "python experiments/reproduce",
        description="Run the paper's experiments part by part, and build the pages with their tables and figures. Each"
        " part is one JSON file. Give the same command again to run the parts whose files are missing. Delete a file to"
        " run its part again, for example after a change of the experiment.",
    )
    make.add_argument("names", nargs="+", help=f"all, a file.toml, or: {', '.join(experiment.names())}")
    make.add_argument("--column", nargs="+", default=(), help="run only these columns: published, ours, path")
    make.add_argument("--variant", nargs="+", default=(), help=f"run only these: {', '.join(experiment.VARIANTS)}")
    make.add_argument("--candidates", nargs="+", type=int, default=(), help="run only these numbers of candidates")
    make.add_argument("--seed", nargs="+", type=int, default=(), help="run only these seeds")
    make.add_argument("--small", action="store_true", help="run a small version: minutes on two cores, no downloads")
    make.add_argument("--tuning", action="store_true", help="use seeds 11 to 14, and no image of a reported seed")
    make.add_argument("--pages", action="store_true", help="run nothing, only build the pages")
    make.add_argument("--budget", type=float, default=math.inf, help="seconds; start no part that would end later")
    processes.add_arguments(make)
    make.add_argument("--out", type=Path, help="folder of all results; default: experiments/results for the paper's"
                      f" experiments in full, {RUNS} for everything else")  # fmt: skip
    make.add_argument("--data-root", type=Path, help="folder of MNIST and CIFAR-10; default: PALIMPSEST_DATA")
    return make


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    selection = Selection(options.column, options.variant, options.candidates, options.seed)
    names = dict.fromkeys(n for name in options.names for n in (experiment.names() if name == "all" else [name]))
    try:
        loaded = [experiment.load(name, small=options.small, tuning=options.tuning) for name in names]
        jobs = [job_for(each, options.out) for each in loaded]
        if len({job.results for job in jobs}) < len(jobs):
            raise InvalidInputError("two files with the same name would share a folder; rename one")
        if not options.pages:
            with processes.executor(options) as workers:
                run(jobs, selection, time.time() + options.budget, workers, options.data_root)
        build_pages(jobs)
    except PalimpsestError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    return 0


def job_for(loaded: Experiment, out: Path | None) -> Job:
    """The paper's experiments, in full, have their results and pages in the repository."""
    if unknown := {goal.measure for goal in loaded.goals} - set(summary.MEASURED):
        raise InvalidInputError(f"{loaded.name} aims at {min(unknown)!r}; choose from {', '.join(summary.MEASURED)}")
    folder = (out or RUNS) / loaded.name
    if out is None and loaded.name in experiment.names():
        return Job(loaded, RESULTS / loaded.name, folder, DOCS)
    return Job(loaded, folder, folder, folder)


# --- running --------------------------------------------------------------------------------------


def run(
    jobs: Sequence[Job], selection: Selection, ends: float, workers: Executor | None, data_root: Path | None
) -> None:
    """Run the selected parts that are missing. The parts of a seed share a network, and run on one worker."""
    wanted = [(job, part) for job in jobs for part in parts.of(job.experiment)]
    selected = dict.fromkeys((job.experiment.name, part.seed) for job, part in wanted if part in selection)
    if not selected:
        raise InvalidInputError(f"no part is selected; {_choices([part for _, part in wanted])}")
    named = {job.experiment.name: job for job in jobs}
    lanes = {
        (name, seed): partial(run_seed, named[name], replace(selection, seed=(seed,)), ends, data_root)
        for name, seed in selected
    }
    for _, finished in completed(lanes, workers):
        finished()


def _choices(every: Sequence[Part]) -> str:
    values = {f.name: dict.fromkeys(str(getattr(part, f.name)) for part in every) for f in fields(Part)}
    return "choose from " + "; ".join(f"{name}: {', '.join(choices)}" for name, choices in values.items())


def run_seed(job: Job, selection: Selection, ends: float, data_root: Path | None) -> None:
    """Run the missing parts of one seed."""
    runner, name = job.runner(data_root), f"{job.experiment.name}, seed {next(iter(selection.seed))}"
    selected = [part for part in parts.of(job.experiment) if part in selection]
    missing = [part for part in selected if part not in runner.results]
    print(f"{name}: {len(selected) - len(missing)} of {len(selected)} parts are there", flush=True)
    if runner.device.type == "cuda":
        torch.compiler.reset()  # torch keeps a limited number of compiled programs; each experiment needs its own
    for number, part in enumerate(missing, 1):
        if time.time() + _expected_seconds(runner, part) > ends:
            print(f"{name}: out of time, parts left: {len(missing) - number + 1}", flush=True)
            return
        try:
            line = _line(runner.result(part))
        except DivergenceError as error:  # the other parts can still be run
            line = str(error)
        print(f"  {job.experiment.name} {number}/{len(missing)} {part.name}: {line}", flush=True)


def _expected_seconds(runner: Runner, part: Part) -> float:
    """The longest time that a part of the same column took."""
    seconds = (result["seconds"] for other, result in runner.results.items() if other.column == part.column)
    return max(seconds, default=0.0)


def _line(result: Result) -> str:
    shown = ("mean SSIM", "above 0.4", "above 0.9", "mean L2", "loss", "seconds")
    return ", ".join(f"{name} {summary.MEASURES[name](result):.3g}" for name in shown)


# --- pages ----------------------------------------------------------------------------------------


def build_pages(jobs: Sequence[Job]) -> None:
    """The pages of experiments that have results; in the repository also the page that compares all experiments."""
    for job in jobs:
        if results := parts.read(job.results, job.experiment):
            job.pages.mkdir(parents=True, exist_ok=True)
            figures.draw(job.experiment, results, job.scratch, job.pages)
            print(f"Tables and figures: {pages.write(job.experiment, results, job.pages)}", flush=True)
    if any(job.pages == DOCS for job in jobs):
        write_atomically(DOCS / "overview.md", pages.overview(repository_results()).encode())


def repository_results() -> dict[Experiment, parts.Results]:
    """Those of the paper's experiments."""
    return {each: parts.read(RESULTS / each.name, each) for each in map(experiment.load, experiment.names())}
