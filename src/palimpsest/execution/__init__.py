"""How a step runs: eagerly, as a captured CUDA graph, or as one of compiled kernels. The step is the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.execution import fusion, kernels
from palimpsest.execution.graph import Graph, Program, Tensors, copies
from palimpsest.execution.precision import matrix_products
from palimpsest.execution.resources import out_of_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMED = 100  # steps of a graph whose time tells whether compiling pays

log = logging.getLogger("palimpsest")
Mode = Literal["auto", "eager", "graph", "compiled-graph"]
MODES: tuple[Mode, ...] = ("eager", "graph", "compiled-graph")

__all__ = ["MODES", "Execution", "Executor", "Mode", "Program", "Tensors"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a run are carried out. The result is the same up to rounding.

    Args:
        mode: ``"eager"``, ``"graph"`` (a CUDA graph), ``"compiled-graph"`` (with fused elementwise work) or ``"auto"``.
            Automatic means eager on a CPU and a graph on CUDA, which is compiled on the way if that saves time in this
            run. If compiling fails, the graph goes on; if a graph fails, the run is eager.
        memory: gigabytes for the intermediate results of a step. None is half of the free memory. Candidates that need
            more are processed in chunks, with the same result.
        tf32: let matrix products on CUDA round float32 factors to 10 bits of mantissa. float64 is never rounded.
        processes: a torch.distributed group whose processes share the candidates, such as
            ``torch.distributed.group.WORLD``. Each makes the same calls, and each gets the result. None is this process
            alone.

    Examples:
        >>> Execution(mode="eager", memory=2.0)
        Execution(mode='eager', memory=2.0, tf32=True, processes=None)
    """

    mode: Mode = "auto"
    memory: float | None = None
    tf32: bool = True
    processes: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise InvalidInputError(f"the mode is {self.mode!r}; choose {', '.join(('auto', *MODES))}")
        if self.memory is not None and not self.memory > 0:
            raise InvalidInputError(f"memory is {self.memory}; give a positive number of gigabytes, or leave it out")

    def resolved(self, device: torch.device) -> Mode:
        """The mode in which a run begins on this device."""
        if "graph" in self.mode and device.type != "cuda":
            raise InvalidInputError(f"there are no CUDA graphs on {device}; choose eager")
        if "compiled" in self.mode and not fusion.available(device):
            raise InvalidInputError(f"torch cannot compile for {device} here; choose eager or graph")
        if self.mode != "auto":
            return self.mode
        return "graph" if device.type == "cuda" else "eager"

    def executor(self, programs: Mapping[str, Program], device: torch.device, *, problem: str = "") -> Executor:
        """An executor of these programs. ``problem`` says what their kernels depend on, besides shapes."""
        mode, automatic = self.resolved(device), self.mode == "auto"
        # Several processes would have to agree on when to compile, so they do not.
        undecided = automatic and mode == "graph" and self.processes is None and fusion.available(device)
        return Executor(programs, mode, may_fall_back=automatic, may_compile=undecided, problem=problem)

    def matrix_precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it, matrix products use TF32 or not."""
        return matrix_products(tf32=self.tf32, device=device)


class Executor:
    """Runs programs, many times in a row, in the chosen mode.

    If it may compile, it times the first steps of the graph and compiles if that saves time. If it may fall back, it
    continues in a simpler mode when one fails.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        mode: Mode,
        *,
        may_fall_back: bool,
        may_compile: bool = False,
        problem: str = "",
    ) -> None:
        self.mode, self._programs, self._problem = mode, programs, problem
        self._may_fall_back, self._may_compile = may_fall_back, may_compile
        self._graph = Graph(programs) if "graph" in mode else None
        self._timed, self._seconds = 0, 0.0

    def run(
        self, tensors: Tensors, plan: Sequence[str], schedule: torch.Tensor | None = None, *, left: int = 0
    ) -> tuple[Tensors, list[Tensors]]:
        """New tensors after the programs named in ``plan``, each with its row of the schedule, and their results.

        About ``left`` steps of the run will follow.
        """
        first = next(iter(tensors.values()))
        schedule = torch.zeros(len(plan), 1, device=first.device) if schedule is None else schedule
        while self._graph is not None:
            began, captures = time.perf_counter(), self._graph.captures
            try:
                with torch.no_grad(), fusion.fused("compiled" in self.mode):
                    found = self._graph.run(tensors, plan, schedule)
            except Exception as error:  # a compiler and its files can fail in any way
                self._step_down(error, tensors)
                continue
            captured = self._graph.captures > captures
            if captured and "compiled" in self.mode:
                kernels.remember(kernels.signature(self._problem, tensors), time.perf_counter() - began)
            if self._may_compile:
                self._time(tensors, 0 if captured else len(plan), began, left)
            return found
        with torch.no_grad():
            tensors = copies(tensors)
            results = [self._programs[name](tensors, row) for name, row in zip(plan, schedule, strict=True)]
        return tensors, [result for result in results if result]

    def _time(self, tensors: Tensors, steps: int, began: float, left: int) -> None:
        """Once enough steps of the graph are timed, compile if that saves time in those that are left.

        No steps count in a call that captured. It is waited for as well, or the next one would seem to take its time.
        """
        if (device := next(iter(tensors.values())).device).type == "cuda":
            torch.cuda.synchronize(device)
        if steps:
            self._timed, self._seconds = self._timed + steps, self._seconds + time.perf_counter() - began
        if self._timed >= TIMED:
            self._may_compile = False
            cost = kernels.cost(kernels.signature(self._problem, tensors))
            if kernels.pays(left, self._seconds / self._timed, cost):
                self.mode, self._graph = "compiled-graph", Graph(self._programs)

    def _step_down(self, error: Exception, tensors: Tensors) -> None:
        """Choose the next simpler mode, or raise the error. One that is not the mode's fault comes again there."""
        compiled = "compiled" in self.mode
        of_the_mode = not out_of_memory(error) and (compiled or isinstance(error, UnsupportedNetworkError))
        if not (self._may_fall_back and of_the_mode):
            raise error
        if compiled:
            kernels.forget(kernels.signature(self._problem, tensors))
        self.mode, self._graph = ("graph", Graph(self._programs)) if compiled else ("eager", None)
        why = f"torch could not compile ({_first_line(error)})" if compiled else _with_cause(error)
        log.warning("%s; continuing in the slower mode %s", why, self.mode)


def _with_cause(error: BaseException) -> str:
    return f"{error} ({_first_line(error.__cause__)})"


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
