"""Parts of an experiment, one after the other or several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch


def run_all(parts: Mapping[str, Callable[[], str | None]], workers: int) -> int:
    """Run every part and print its line, if it has one. The value is 1 if a part failed in its process, else 0."""
    if workers <= 1:
        for run in parts.values():
            _show(run())
        return 0
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in every process, of which there are enough
    failed = 0
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        running = {pool.submit(run): name for name, run in parts.items()}
        for done in as_completed(running):
            if error := done.exception():
                print(f"{running[done]} failed: {error!r}", flush=True)
                failed = 1
            else:
                _show(done.result())
    return failed


def _show(line: str | None) -> None:
    if line is not None:
        print(line, flush=True)
