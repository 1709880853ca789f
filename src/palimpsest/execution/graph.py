"""Many steps without the host: programs are captured once as CUDA graphs and replayed.

A graph is bound to its memory, so it has its own buffers. The schedule and a counter of its rows lie on the device too.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from palimpsest.errors import UnsupportedNetworkError

Tensors = dict[str, Tensor]
Program = Callable[[Tensors, Tensor], Tensors | None]
"""Changes the tensors in place, with the numbers in a row of the schedule. It must not read values back from the
device. It may return tensors to record."""

ROWS = 4096  # of the schedule on the device
CAPTURE = "waits for the host, which a CUDA graph cannot do; use the execution mode eager"
WARM_UP = 2  # runs before capturing, in which libraries start and kernels are compiled


class Graph:
    """Runs programs as CUDA graphs. They are captured again when the tensors change their shapes."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = programs
        self.captures = 0  # how many times all programs were captured
        self._buffers: Tensors = {}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._results: dict[str, Tensors] = {}

    def run(self, tensors: Tensors, plan: Sequence[str], schedule: Tensor) -> tuple[Tensors, list[Tensors]]:
        if not self._graphs or _shapes(tensors) != _shapes(self._buffers):
            self._capture(tensors, schedule)
        for name, t in tensors.items():
            self._buffers[name].copy_(t)
        results = []
        for start in range(0, len(plan), ROWS):
            rows = schedule[start : start + ROWS]
            self._schedule[: len(rows)].copy_(rows)
            self._next.zero_()
            for name in plan[start : start + ROWS]:
                self._graphs[name].replay()
                if self._results[name]:  # read now: the steps after it run while the host waits
                    results.append({key: t.cpu() for key, t in self._results[name].items()})
        return copies(self._buffers), results

    def _capture(self, tensors: Tensors, schedule: Tensor) -> None:
        self._graphs.clear()  # their memory is free before the next are captured
        self._results.clear()
        self._buffers = copies(tensors)
        self._schedule = schedule[:1].repeat(ROWS, 1)
        self._next = torch.zeros(1, dtype=torch.long, device=schedule.device)
        stream = torch.cuda.Stream(schedule.device)
        stream.wait_stream(torch.cuda.current_stream(schedule.device))
        with torch.cuda.stream(stream):
            for name in WARM_UP * list(self._programs):
                self._once(name)
        torch.cuda.current_stream(schedule.device).wait_stream(stream)
        pool, graphs = torch.cuda.graph_pool_handle(), {}
        with _nothing_collected():
            for name in self._programs:
                graphs[name] = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graphs[name], pool=pool):
                        self._results[name] = self._once(name)
                except (RuntimeError, UnsupportedNetworkError) as error:
                    raise UnsupportedNetworkError("", CAPTURE) from error
        self._graphs = graphs
        self.captures += 1

    def _once(self, name: str) -> Tensors:
        row = self._schedule.index_select(0, self._next)[0]
        self._next.add_(1)
        return self._programs[name](self._buffers, row) or {}


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python must not free a graph of an earlier run while another is captured: that would break the capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def copies(tensors: Tensors) -> Tensors:
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def _shapes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}
