"""Steps compiled whole, for CPUs: a program is traced once for tensors of given shapes, and what was traced compiled.

Whatever else the program makes use of is built into the code as a constant, which lets torch lay out matrices in the
order in which their products read them. So it must not change unless a shape does. Torch keeps the code, and these
constants, until the process ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from palimpsest.errors import UnsupportedNetworkError
from palimpsest.execution.eager import Eager, Program, Tensors, copies, shapes

COMPILING = "computes what torch cannot compile on this machine; use the execution mode eager"


class Whole:
    """Runs programs, those that come ``often`` compiled; compiled anew when the tensors change their shapes."""

    def __init__(self, programs: Mapping[str, Program], often: Collection[str]) -> None:
        self._programs, self._often = programs, often
        self._compiled: dict[str, Program] = {}
        self._shapes: object = None

    def run(self, tensors: Tensors, plan: Sequence[str], paces: Tensor) -> tuple[Tensors, list[Tensors]]:
        if self._shapes != shapes(tensors):
            self._shapes = shapes(tensors)
            self._compiled.clear()
        for name in set(plan).intersection(self._often) - self._compiled.keys():
            self._compiled[name] = _compiled(self._programs[name], tensors, paces[0])
        return Eager({**self._programs, **self._compiled}).run(tensors, plan, paces)


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

    # Traced on tensors without values: what would read one, and make it a constant, fails.
    trace = make_fx(bare, tracing_mode="fake", _allow_non_fake_inputs=True)
    options = {"freezing": pace.dtype == torch.float32}  # what lays out constants knows no other numbers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            code = torch._inductor.compile(trace(*example()), example(), options=options)
            code(*example())
    except Exception as error:  # of whatever kind: torch, the network, the compiler, the disk
        raise UnsupportedNetworkError("", COMPILING) from error

    def run(tensors: Tensors, pace: Tensor) -> Tensors:
        return dict(zip(returned, code(pace, *(tensors[name] for name in names)), strict=True))

    return run
