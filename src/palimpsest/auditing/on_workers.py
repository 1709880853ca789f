"""The reconstructions of a rung on the workers of an executor, several at a time.

A worker does a stage as the audit itself would do it, in another folder, and sends back the files that it wrote. So it
sees neither the run folder nor the training images. The audit puts the files into the run folder, and then goes through
all stages as it does without workers: it finds the finished ones there. The files hold the same numbers, bit for bit on
the same kind of machine with the same number of threads. A stage that runs out of time leaves its checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from palimpsest.auditing.case import Case, OutOfTimeError
from palimpsest.auditing.controls import CONTROL, positive_control
from palimpsest.auditing.plan import NEEDED_RUNS, Plan
from palimpsest.auditing.reading import CHECKPOINT, UNTRAINABLE, PosedByRole, file_of, read_once
from palimpsest.errors import NoAnswerError
from palimpsest.execution.workers import completed
from palimpsest.files.storage import write_atomically
from palimpsest.runs.journal import note

Files = dict[Path, bytes]  # by their paths in the folder


class Stage(NamedTuple):
    """Work that fills a folder, and the files that it finds there if they exist."""

    work: Callable[[Case], object]
    needs: tuple[Path, ...] = ()


def read_on_workers(case: Case, plan: Plan, runs: Iterable[tuple[str, int]]) -> None:
    """Put the missing files of these reconstructions into the folder, if the audit has workers.

    The reconstructions that a verdict needs come first. The positive control is trained at the same time.
    """
    if case.executor is None:
        return
    missing = [run for run in runs if not (case.folder / file_of(*run)).exists()]
    later = [(role, number) for role, number in missing if role == "positive" or number >= NEEDED_RUNS]
    stages = _readings(plan, [run for run in missing if run not in later])
    if any(role == "positive" for role, _ in later) and not (case.folder / CONTROL).exists():
        stages["training the positive control"] = Stage(partial(_train, plan=plan))
    _do(case, stages)
    trained = (case.folder / CONTROL).exists()
    _do(case, _readings(plan, [run for run in later if trained or run[0] != "positive"]))


def _readings(plan: Plan, runs: Iterable[tuple[str, int]]) -> dict[str, Stage]:
    stages = {}
    for role, number in runs:
        needs = (file_of(role, number).with_suffix(CHECKPOINT), *((CONTROL,) if role == "positive" else ()))
        stages[f"{role} {number + 1}"] = Stage(partial(_reconstruct, plan=plan, role=role, number=number), needs)
    return stages


def _reconstruct(case: Case, plan: Plan, role: str, number: int) -> None:
    with suppress(*UNTRAINABLE) if role == "positive" else nullcontext():  # as in `_train`
        read_once(case, plan, role, number, PosedByRole(case, plan))


def _train(case: Case, plan: Plan) -> None:
    with suppress(*UNTRAINABLE):  # the audit meets this error again, and says what it means
        positive_control(case, plan)


def _do(case: Case, stages: Mapping[str, Stage]) -> None:
    """Do the stages on the workers, and keep the files of each as soon as it is done."""
    if not stages:
        return
    note(f"on the workers: {', '.join(stages)}")
    parts = {
        name: partial(_files, case.sent, stage.work, _read(case.folder, stage.needs))
        for name, stage in stages.items()
    }  # fmt: skip
    with suppress(NoAnswerError):  # the audit finds out by itself that the time is spent
        for name, files in completed(parts, case.executor, seconds=case.patience):
            for path, content in files().items():
                (case.folder / path).parent.mkdir(exist_ok=True)
                write_atomically(case.folder / path, content)
            note(f"back from a worker: {name}")


def _files(case: Case, work: Callable[[Case], object], given: Files) -> Files:
    """On a worker: the new files in a folder after the work."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in given.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content)
        with suppress(OutOfTimeError):
            work(replace(case, folder=folder))
        found = _read(folder, [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()])
        return {path: content for path, content in found.items() if given.get(path) != content}


def _read(folder: Path, paths: Iterable[Path]) -> Files:
    return {path: (folder / path).read_bytes() for path in paths if (folder / path).exists()}
