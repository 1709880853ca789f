"""Steps compiled whole, for CPUs: a program is traced once for tensors of given shapes, and what was traced compiled.

Whatever the program holds besides its tensors stays the same while it runs. It is built into the code as a constant,
which lets torch lay out matrices in the order in which their products read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from palimpsest.errors import UnsupportedNetworkError
from palimpsest.execution.eager import Program, Tensors, copies, shapes

COMPILING = "computes what torch cannot compile on this machine; use the execution mode eager"


class Whole:
    """Runs compiled programs, compiled anew when the tensors change their shapes.

    What a plan asks for only once is not worth compiling, and is called instead.
    """

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = programs
        self._compiled: dict[str, Callable[[Tensors, Tensor], Tensors]] = {}
        self._shapes: object = None

    def run(self, tensors: Tensors, plan: Sequence[str], paces: Tensor) -> tuple[Tensors, list[Tensors]]:
        tensors = copies(tensors)
        if self._shapes != shapes(tensors):
            self._shapes = shapes(tensors)
            self._compiled.clear()
        for name in {name for name in plan if plan.count(name) > 1} - self._compiled.keys():
            self._compiled[name] = _compiled(self._programs[name], tensors, paces[0])
        programs = {**self._programs, **self._compiled}
        results = [programs[name](tensors, pace) for name, pace in zip(plan, paces, strict=True)]
        return tensors, [result for result in results if result]


def _compiled(program: Program, tensors: Tensors, pace: Tensor) -> Callable[[Tensors, Tensor], Tensors]:
    """The program as a function of bare tensors, traced and compiled, and that function as a program."""
    import torch._inductor  # takes a second, which is only spent here
    from torch.fx.experimental.proxy_tensor import make_fx

    names: list[str] = list(tensors)
    returned: list[str] = []

    def bare(pace: Tensor, *values: Tensor) -> list[Tensor]:
        result = program(dict(zip(names, values, strict=True)), pace) or {}
        returned[:] = result
        return list(result.values())

    def example() -> list[Any]:
        return [pace.clone(), *copies(tensors).values()]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            code = torch._inductor.compile(make_fx(bare)(*example()), example(), options={"freezing": True})
            code(*example())
    except RuntimeError as error:
        raise UnsupportedNetworkError("", COMPILING) from error

    def run(tensors: Tensors, pace: Tensor) -> Tensors:
        return dict(zip(returned, code(pace, *(tensors[name] for name in names)), strict=True))

    return run
