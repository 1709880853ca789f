"""Work that is written once, and run plainly or compiled. A compiled chain of operations reads and writes memory once.

Within :func:`fused`, torch compiles a :class:`fusible` elementwise function on its first call, for tensors of any size.
A :class:`Traced` function may differentiate by autograd. It is compiled as a whole, for each combination of shapes.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MOST_VARIANTS = 1000  # of a function, by types and options of its arguments; a long session needs many
_fusing = False


class fusible:  # noqa: N801 - a decorator
    """Marks a function of tensors, without autograd inside, as one that may be compiled.

    It must not change single numbers in place: torch 2.13 takes those for constants on a CPU, and loses the change.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        functools.update_wrapper(self, function)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.plain, dynamic=True, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        if not _fusing:
            return self.plain(*arguments)
        with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
            return self.compiled(*arguments)


class Traced:
    """A function of tensors, with autograd inside, whose operations do not depend on the tensors' values."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self._compiled: dict[tuple, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        if not _fusing:
            return self.plain(*tensors)
        shapes = tuple((t.shape, t.dtype, t.device) for t in tensors)
        if shapes not in self._compiled:
            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, which other runs need not wait

            with fused(False):
                self._compiled[shapes] = torch.compile(make_fx(self.plain)(*tensors), dynamic=False, fullgraph=True)
        return self._compiled[shapes](*tensors)


@contextmanager
def fused(on: bool = True) -> Iterator[None]:
    """Within it, fusible functions run compiled."""
    global _fusing
    before, _fusing = _fusing, on
    try:
        yield
    finally:
        _fusing = before


def available(device: torch.device) -> bool:
    """Whether Triton can compile for this device."""
    found = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability(device) >= (7, 0)
