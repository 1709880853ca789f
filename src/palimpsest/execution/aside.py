"""Work beside other work, on a GPU that one kernel does not fill.

The products of a few hundred candidates occupy a fraction of a GPU. A CUDA graph that is recorded on two streams runs
kernels that do not need each other at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def aside(work: Callable[[], T]) -> Callable[[], T]:
    """A function that returns what ``work`` returns. Call it in any case, and once.

    While a CUDA graph is recorded, the work begins now, on a second stream, after all work so far. The function waits
    for it; until then it keeps alive what the work reads. Anywhere else the work is done when the function is called.
    """
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return work
    main, side = torch.cuda.current_stream(), _side(torch.cuda.current_device())
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = work()
    return functools.partial(_joined, main, side.record_event(), result, work)


def _joined(main: torch.cuda.Stream, done: torch.cuda.Event, result: T, work: Callable[[], T]) -> T:
    main.wait_event(done)
    return result


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
