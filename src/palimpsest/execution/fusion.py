"""Elementwise work, written once and run plainly or as one compiled kernel.

Within :func:`fused`, torch compiles a :class:`fusible` function on its first call, for tensors of any size. A chain of
elementwise operations then reads and writes memory once.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
