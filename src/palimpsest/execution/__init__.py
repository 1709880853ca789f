"""How a step runs: eagerly, with its elementwise work compiled, or as a captured CUDA graph. The step is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from palimpsest import fusion
from palimpsest.errors import InvalidInputError
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.execution.eager import Eager, Program, Tensors
from palimpsest.execution.graph import Graph
from palimpsest.precision import matrix_products

WORTH_COMPILING = 10_000  # steps: compiling takes seconds, and then saves a third of each

Mode = Literal["auto", "eager", "compiled", "graph", "compiled-graph"]
MODES: tuple[Mode, ...] = ("eager", "compiled", "graph", "compiled-graph")

__all__ = ["MODES", "Execution", "Executor", "Mode", "Program", "Tensors"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the steps of a run are carried out; what they compute is the same, up to rounding.

    Args:
        mode: ``"eager"``; ``"compiled"``, elementwise work fused by torch.compile; ``"graph"``, a CUDA graph, which
            needs no launches from the host; ``"compiled-graph"``, both. ``"auto"`` takes a graph on CUDA, compiled
            for long runs, and the first on CPUs, where a run is over before compiling has paid.
        memory: gigabytes that the intermediate results of a step may take, by default half of what is free. Where all
            candidates together would take more they are worked on in chunks, to the same result.
        tf32: let matrix products on CUDA round float32 factors to 10 bits of mantissa; float64 is never rounded.
    """

    mode: Mode = "auto"
    memory: float | None = None
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise InvalidInputError(f"the mode is {self.mode!r}; choose {', '.join(('auto', *MODES))}")
        if self.memory is not None and not self.memory > 0:
            raise InvalidInputError(f"memory is {self.memory}; give a positive number of gigabytes, or leave it out")

    def resolved(self, device: torch.device, steps: int) -> Mode:
        """The mode, with "auto" decided for a device and a number of steps."""
        if "graph" in self.mode and device.type != "cuda":
            raise InvalidInputError(f"there are no CUDA graphs on {device}; choose eager or compiled")
        if "compiled" in self.mode and not fusion.available(device):
            raise InvalidInputError(f"torch cannot compile for {device} here; choose eager, or graph on CUDA")
        if self.mode != "auto":
            return self.mode
        if device.type != "cuda":
            return "eager"
        return "compiled-graph" if fusion.available(device) and steps >= WORTH_COMPILING else "graph"

    def executor(self, programs: Mapping[str, Program], device: torch.device, *, steps: int) -> Executor:
        """What runs these programs, about so many times."""
        if device.type == "cpu":
            keep_freed_memory()
        return Executor(programs, self.resolved(device, steps))

    def numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it, matrix products have the precision asked for."""
        return matrix_products(tf32=self.tf32, device=device)


class Executor:
    """Runs programs, many times in a row, in the chosen mode."""

    def __init__(self, programs: Mapping[str, Program], mode: Mode) -> None:
        self.mode = mode
        self._runner = (Graph if "graph" in mode else Eager)(programs)

    def run(
        self, tensors: Tensors, plan: Sequence[str], paces: torch.Tensor | None = None
    ) -> tuple[Tensors, list[Tensors]]:
        """The tensors after the programs named in ``plan``, and what these returned; those given stay as they are.

        Each program is given its row of ``paces``.
        """
        first = next(iter(tensors.values()))
        paces = torch.zeros(len(plan), 1, device=first.device) if paces is None else paces
        with torch.no_grad(), fusion.fused("compiled" in self.mode):
            return self._runner.run(tensors, plan, paces)
