"""Run programs step by step, from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Program = Callable[[Tensors, Tensor], Tensors | None]
"""Changes the tensors in place, with the numbers in a row of the schedule. It must not read values back from the
device. It may return tensors to record."""


class Eager:
    """Runs programs by calling them."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = programs

    def run(self, tensors: Tensors, plan: Sequence[str], schedule: Tensor) -> tuple[Tensors, list[Tensors]]:
        tensors = copies(tensors)
        results = [self._programs[name](tensors, row) for name, row in zip(plan, schedule, strict=True)]
        return tensors, [result for result in results if result]


def copies(tensors: Tensors) -> Tensors:
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def shapes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}
