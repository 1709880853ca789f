"""How a step runs: eagerly, or as a captured CUDA graph. The step is the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.execution import fusion
from palimpsest.execution.graph import Graph, Program, Tensors, copies
from palimpsest.execution.precision import matrix_products

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WORTH_COMPILING = 20_000  # steps: compiling takes ten to thirty seconds and saves a third of each step

log = logging.getLogger("palimpsest")
Mode = Literal["auto", "eager", "graph", "compiled-graph"]
MODES: tuple[Mode, ...] = ("eager", "graph", "compiled-graph")

__all__ = ["MODES", "Execution", "Executor", "Mode", "Program", "Tensors"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a run are carried out. The result is the same up to rounding.

    Args:
        mode: ``"eager"``, ``"graph"`` (a CUDA graph), ``"compiled-graph"`` (with fused elementwise work) or ``"auto"``.
            Automatic means eager on a CPU and a graph on CUDA, compiled for long runs. If a graph fails, the run is
            eager.
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

    def resolved(self, device: torch.device, steps: int) -> Mode:
        """The mode, with "auto" decided for a device and a number of steps."""
        if "graph" in self.mode and device.type != "cuda":
            raise InvalidInputError(f"there are no CUDA graphs on {device}; choose eager")
        if "compiled" in self.mode and not fusion.available(device):
            raise InvalidInputError(f"torch cannot compile for {device} here; choose eager or graph")
        if self.mode != "auto":
            return self.mode
        if device.type != "cuda":
            return "eager"
        return "compiled-graph" if steps >= WORTH_COMPILING and fusion.available(device) else "graph"

    def executor(self, programs: Mapping[str, Program], device: torch.device, *, steps: int) -> Executor:
        """An executor of these programs for a run of about this many steps."""
        return Executor(programs, self.resolved(device, steps), may_fall_back=self.mode == "auto")

    def matrix_precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it, matrix products use TF32 or not."""
        return matrix_products(tf32=self.tf32, device=device)


class Executor:
    """Runs programs, many times in a row, in the chosen mode; eagerly if a graph fails and it may fall back."""

    def __init__(self, programs: Mapping[str, Program], mode: Mode, *, may_fall_back: bool) -> None:
        self.mode, self._programs, self._may_fall_back = mode, programs, may_fall_back
        self._graph = Graph(programs) if "graph" in mode else None

    def run(
        self, tensors: Tensors, plan: Sequence[str], schedule: torch.Tensor | None = None
    ) -> tuple[Tensors, list[Tensors]]:
        """New tensors after the programs named in ``plan``, each with its row of the schedule, and their results."""
        first = next(iter(tensors.values()))
        schedule = torch.zeros(len(plan), 1, device=first.device) if schedule is None else schedule
        with torch.no_grad(), fusion.fused("compiled" in self.mode):
            try:
                if self._graph is not None:
                    return self._graph.run(tensors, plan, schedule)
            except UnsupportedNetworkError as error:
                if not self._may_fall_back:
                    raise
                log.warning("%s (%s); continuing in the slower mode eager", error, _first_line(error.__cause__))
                self.mode, self._graph = "eager", None
        with torch.no_grad():
            tensors = copies(tensors)
            results = [self._programs[name](tensors, row) for name, row in zip(plan, schedule, strict=True)]
        return tensors, [result for result in results if result]


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
