"""One reconstruction on several processes, by torch.distributed: one process for each GPU, or for a few cores.

Each process holds a share of the candidates and computes its part of v = Σ_i λ_i f(x_i). One all-reduce per step adds
the parts up. Given v, every gradient belongs to a candidate, and so to one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from palimpsest.errors import InvalidInputError, PalimpsestError, ProcessEndedError
from palimpsest.execution.resources import out_of_memory

R = TypeVar("R")


class Processes:
    """The processes that share a reconstruction: those of a torch.distributed group, or this one alone.

    `total`, `joined` and `from_first` are collective: every process calls them in the same order.

    >>> alone = Processes()
    >>> alone.first, alone.mine(torch.arange(3))
    (True, tensor([0, 1, 2]))
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.count = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and shows the progress."""
        return self.rank == 0

    @property
    def on_this_host(self) -> int:
        """The number of these processes that share the memory of this host."""
        return min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))

    def mine(self, t: Tensor) -> Tensor:
        """The rows of this process, of a tensor with a row for each candidate. Shares are consecutive and even."""
        return t if self.count == 1 else t[slice(*self._bounds(len(t))[self.rank : self.rank + 2])].clone()

    def total(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ over the processes for each name, by one all-reduce."""
        if self.count == 1:
            return dict(parts)
        flat = torch.cat([t.flatten() for t in parts.values()])
        with _all_alive():
            dist.all_reduce(flat, group=self.group)
        sums = flat.split([t.numel() for t in parts.values()])
        return {name: s.view_as(t) for s, (name, t) in zip(sums, parts.items(), strict=True)}

    def joined(self, mine: Tensor, k: int) -> Tensor:
        """The rows of all k candidates, in their order, from each process's own."""
        if self.count == 1:
            return mine
        sizes = [end - start for start, end in pairwise(self._bounds(k))]
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])  # torch gathers tensors of one shape
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        with _all_alive():
            dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def from_first(self, make: Callable[[], R]) -> R:
        """The value that the first process makes, or the error that it raises, on every process."""
        if self.count == 1:
            return make()
        made: list[tuple[R | None, Exception | None]] = [(None, None)]
        if self.first:
            try:
                made = [(make(), None)]
            except (PalimpsestError, OSError) as error:
                made = [(None, error)]
        with _all_alive():
            dist.broadcast_object_list(made, group=self.group, group_src=0)
        value, failure = made[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def _bounds(self, k: int) -> list[int]:
        """The first candidate of each process, and k."""
        if k < self.count:
            raise InvalidInputError(f"{k} candidates do not suffice for {self.count} processes; start at most {k}")
        return [k * rank // self.count for rank in range(self.count + 1)]


_signals: list[object] = []  # by which torchrun asked this process to end


@contextmanager
def _all_alive() -> Iterator[None]:
    """Within it, the end of another process is named. Gloo notices a closed connection at once.

    A signal is noted, and takes effect here. An exception that it raised in the middle of torch could become another.
    """
    if _signals:
        raise ProcessEndedError()
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise ProcessEndedError() from error


# --- processes that torchrun started ---------------------------------------------------------------


def launched() -> int:
    """The number of processes that torchrun started for this command."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def place() -> tuple[int, int]:
    """The number of this process among all that torchrun started, and among those on this host."""
    return (int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))) if launched() > 1 else (0, 0)


@contextmanager
def joined_by_torchrun(device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """The group of the processes that torchrun started. None if this process is the only one."""
    if launched() == 1:
        yield None
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cpu":  # with a GPU, Python could be waiting for it, and would not react to torchrun's signal
        _signals.clear()
        signal.signal(signal.SIGTERM, lambda number, _: _signals.append(number))
    yield dist.group.WORLD
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    dist.destroy_process_group()  # not after an error: it could wait for a process that is gone
