"""How a step runs: eagerly, compiled, or as a captured CUDA graph. The step is the same."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.execution import fusion
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.execution.eager import Eager, Program, Tensors
from palimpsest.execution.graph import Graph
from palimpsest.execution.precision import matrix_products
from palimpsest.execution.whole import Whole

WORTH_COMPILING = 20_000  # steps: compiling takes some ten to thirty seconds, and then saves a third of each

log = logging.getLogger("palimpsest")
Mode = Literal["auto", "eager", "compiled", "graph", "compiled-graph"]
MODES: tuple[Mode, ...] = ("eager", "compiled", "graph", "compiled-graph")

__all__ = ["MODES", "Execution", "Executor", "Mode", "Program", "Tensors"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a run are carried out. The result is the same up to rounding.

    Args:
        mode: ``"eager"``, ``"compiled"``, ``"graph"`` (a CUDA graph), ``"compiled-graph"`` or ``"auto"``. Automatic
            means a graph on CUDA, eager on a CPU, and compilation for long runs. If that fails, the run is eager.
        memory: gigabytes for the intermediate results of a step. None is half of the free memory. Candidates that need
            more are processed in chunks, with the same result.
        tf32: let matrix products on CUDA round float32 factors to 10 bits of mantissa. float64 is never rounded.

    Examples:
        >>> Execution(mode="eager", memory=2.0)
        Execution(mode='eager', memory=2.0, tf32=True)
    """

    mode: Mode = "auto"
    memory: float | None = None
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise InvalidInputError(f"the mode is {self.mode!r}; choose {', '.join(('auto', *MODES))}")
        if self.memory is not None and not self.memory > 0:
            raise InvalidInputError(f"memory is {self.memory}; give a positive number of gigabytes, or leave it out")

    def resolved(self, device: torch.device, steps: int, phases: int = 1) -> Mode:
        """The mode, with "auto" decided for a device and a number of steps in so many phases of different shapes."""
        if "graph" in self.mode and device.type != "cuda":
            raise InvalidInputError(f"there are no CUDA graphs on {device}; choose eager or compiled")
        if "compiled" in self.mode and not fusion.available(device):
            raise InvalidInputError(f"torch cannot compile for {device} here; choose eager, or graph on CUDA")
        if self.mode != "auto":
            return self.mode
        if device.type == "cuda":  # what is compiled there serves tensors of all shapes
            return "compiled-graph" if steps >= WORTH_COMPILING and fusion.available(device) else "graph"
        worth_it = device.type == "cpu" and steps >= phases * WORTH_COMPILING
        return "compiled" if worth_it and fusion.available(device) else "eager"

    def executor(
        self,
        programs: Mapping[str, Program],
        device: torch.device,
        *,
        often: Collection[str],
        steps: int,
        phases: int = 1,
    ) -> Executor:
        """What runs these programs, those that come often about so many times."""
        if device.type == "cpu":
            keep_freed_memory()
        return Executor(programs, self.resolved(device, steps, phases), device, often, insist=self.mode != "auto")

    def numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it, matrix products have the precision asked for."""
        return matrix_products(tf32=self.tf32, device=device)


class Executor:
    """Runs programs, many times in a row, in the chosen mode; eagerly if that fails and is not insisted on."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        mode: Mode,
        device: torch.device,
        often: Collection[str],
        *,
        insist: bool,
    ) -> None:
        self.mode, self._programs, self._insist = mode, programs, insist
        self._whole = mode == "compiled" and device.type == "cpu"
        self._runner: Whole | Graph | Eager
        self._runner = Whole(programs, often) if self._whole else (Graph if "graph" in mode else Eager)(programs)

    def leave_uncompiled(self) -> None:
        """Compile no whole program from now on."""
        if self._whole:
            self.mode, self._whole, self._runner = "eager", False, Eager(self._programs)

    def run(
        self, tensors: Tensors, plan: Sequence[str], paces: torch.Tensor | None = None
    ) -> tuple[Tensors, list[Tensors]]:
        """The tensors after the programs named in ``plan``, and what these returned; those given stay as they are.

        Each program is given its row of ``paces``.
        """
        first = next(iter(tensors.values()))
        paces = torch.zeros(len(plan), 1, device=first.device) if paces is None else paces
        with torch.no_grad(), fusion.fused("compiled" in self.mode and not self._whole):
            try:
                return self._runner.run(tensors, plan, paces)
            except UnsupportedNetworkError as error:
                if self._insist or self.mode == "eager":
                    raise
                log.warning("%s (%s); going on in the mode eager, which is slower", error, _first_line(error.__cause__))
        self.mode, self._runner = "eager", Eager(self._programs)
        return self.run(tensors, plan, paces)


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
