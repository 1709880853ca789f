"""Parts of an experiment: one after the other, or several at a time, on this machine or on a cluster.

A part keeps its result in a file. Workers on other machines therefore need the repository on a shared file system:
start them there, by ``PYTHONPATH=experiments dask worker ADDRESS --nthreads 1``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

from palimpsest.errors import PalimpsestError
from palimpsest.execution.workers import cluster, completed, local

Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser, *, workers: int | None = 1) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--workers", type=int, default=workers, help="processes on this machine")
    where.add_argument("--cluster", metavar="ADDRESS", help="Dask scheduler whose workers run the parts, such as"
                       " tcp://scheduler:8786")  # fmt: skip


@contextmanager
def executor(options: argparse.Namespace) -> Iterator[Executor | None]:
    """The workers that the command line asks for; None is this process."""
    if options.cluster is not None:
        with cluster(options.cluster) as opened:
            yield opened
    elif options.workers > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in every process, of which there are enough
        with local(options.workers) as opened:
            yield opened
    else:
        yield None


def results(parts: Sequence[Callable[[], Result]], workers: Executor | None) -> list[Result]:
    """The results of the parts, in their order."""
    made = {number: result() for number, result in completed(dict(enumerate(parts)), workers)}
    return [made[number] for number in range(len(parts))]


def run_all(parts: Mapping[str, Callable[[], str | None]], options: argparse.Namespace) -> int:
    """Run every part and print its line, if it has one.

    The value is the exit status: 1 if a part failed on its worker, and 2 after an error that the user can mend.
    """
    status = 0
    try:
        with executor(options) as workers:
            for name, result in completed(parts, workers):
                try:
                    line = result()
                except Exception as error:
                    if workers is None:
                        raise
                    status, line = 1, f"{name} failed: {error!r}"  # the other parts can still be run
                if line is not None:
                    print(line, flush=True)
    except PalimpsestError as error:
        print(error, file=sys.stderr)
        return 2
    return status
