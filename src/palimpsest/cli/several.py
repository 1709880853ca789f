"""`palimpsest audit` of several models: a sub-folder of --out for each, and audits.csv, which sums them up."""

import csv
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from palimpsest import auditing
from palimpsest.auditing.gate import LEAKS, PASS, UNDECIDED
from palimpsest.auditing.images import shielded
from palimpsest.cli import shared
from palimpsest.errors import InvalidInputError, PalimpsestError
from palimpsest.execution.workers import completed, local
from palimpsest.files.storage import write_atomically
from palimpsest.runs.journal import note, printable

COLUMNS = ("model", "headline", "recovered", "images", "highest_probability", "remark")
FAILED = 1
WORST = (FAILED, LEAKS, UNDECIDED, PASS)  # the status of all is the first that one of them has


def names_of(models: Sequence[Path]) -> dict[str, Path]:
    """A name for each file, from the parts of its path that distinguish it.

    >>> names_of([Path("zoo/a/final.pt"), Path("zoo/b/final.pt")])
    {'a-final': PosixPath('zoo/a/final.pt'), 'b-final': PosixPath('zoo/b/final.pt')}
    """
    common = os.path.commonpath([path.absolute().parent for path in models])
    named = {"-".join(path.absolute().relative_to(common).with_suffix("").parts): path for path in models}
    if len(named) < len(models):
        raise InvalidInputError("two models have the same name, and would share a folder; rename one")
    return named


def audit_several(audits: Mapping[str, Callable[[], int]], out: Path, *, at_once: bool) -> int:
    """Do the audits, one after the other or as many at once as there are cores, and write audits.csv.

    An audit that fails does not stop the others.
    """
    failures, statuses = dict[str, str](), set[int]()
    parts = {name: partial(_in_its_own_time, audit) for name, audit in audits.items()}
    out.mkdir(parents=True, exist_ok=True)
    with local(min(len(audits), os.cpu_count() or 1)) if at_once else nullcontext() as executor:
        for name, status in completed(parts, executor):
            try:
                statuses.add(status())
            except shared.CommandFailedError:  # by Ctrl-C
                raise
            except (PalimpsestError, OSError, MemoryError, RuntimeError) as error:  # one model must not stop the others
                note(f"{name}: {error}")
                failures[name] = str(error)
                statuses.add(FAILED)
    rows = [_failed(name, failures[name]) if name in failures else _row(name, out / name) for name in audits]
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *([shielded(cell) for cell in row] for row in rows)])
    write_atomically(out / "audits.csv", file.getvalue().encode())
    shown = [row[:-1] for row in ([name.replace("_", " ") for name in COLUMNS], *rows)]
    widths = [max(len(row[i]) for row in shown) + 2 for i in range(len(shown[0]))]
    for row in shown:
        cells = (printable(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        print("".join(cells).rstrip())
    return next(status for status in WORST if status in statuses)


def _in_its_own_time(audit: Callable[[], int]) -> int:
    shared.began = time.monotonic()
    return audit()


def _row(name: str, folder: Path) -> tuple[str, ...]:
    found = auditing.load(folder)
    recovered = None if found.images is None or found.images.recovered is None else len(found.images.recovered)
    known = [each.estimates.highest for each in found.readings if each.estimates.highest is not None]
    highest = f"{max(known):.2f}" if known else ""  # networks of other kinds have ranks only
    images = "" if found.images is None else str(found.images.total)
    counted = "" if recovered is None else str(recovered)
    return name, found.verdict.outcome, counted, images, highest, found.verdict.sentence


def _failed(name: str, reason: str) -> tuple[str, ...]:
    return name, "failed", "", "", "", reason
