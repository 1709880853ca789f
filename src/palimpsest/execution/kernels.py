"""Compiled kernels: whether compiling pays in a run, and which kernels are there already.

Compiling costs seconds once, and then saves a share of every step. A process remembers the problems that it compiled
for. A further run of one traces its network again, and finds the kernels. Torch keeps kernels on disk too, where
TORCHINDUCTOR_CACHE_DIR says; a marker there names each problem.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from palimpsest import __version__

if TYPE_CHECKING:
    from palimpsest.execution.graph import Tensors

# docs/results/performance-h200.json: of a step as a graph, fusing saves 24 to 35 % on four shapes.
GAIN = 0.3
# Seconds. By docs/results/cold-start.json, 20,000 steps take 8.4 s as a graph, 35.4 s with new kernels and 20.6 s with
# kernels from disk. Of these, 5.9, 4.5 and 4.5 s are the steps themselves. The rest is 28 and 14 s longer if compiled.
COMPILING, LOADING = 28.0, 14.0
# The share of the first time that compiling takes again: 0.01 to 0.02 for small networks on a CPU, 0.3 for the tracing
# of ResNet-18. From the second time on, the time itself is known.
AGAIN = 0.05
FOLDER, DISK = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"

_compiled: dict[str, float] = {}  # the problems of this process, and the seconds that each will take again


def pays(left: int, step: float, cost: float) -> bool:
    """Whether fused kernels save more seconds of the steps that are left than they cost; a plain step takes ``step``.

    >>> pays(20_000, 0.296e-3, COMPILING), pays(20_000, 0.296e-3, 1.0), pays(400_000, 0.296e-3, COMPILING)
    (False, True, True)
    """
    return left * GAIN * step > cost


def signature(problem: str, tensors: Tensors) -> str:
    """A name for the kernels of a problem: equal names mean equal kernels."""
    device = next(iter(tensors.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shapes = [(key, tuple(t.shape), str(t.dtype)) for key, t in sorted(tensors.items())]
    return hashlib.sha256(repr((__version__, torch.__version__, name, problem, shapes)).encode()).hexdigest()


def cost(name: str) -> float:
    """Seconds until the kernels of this signature are ready."""
    if name in _compiled:
        return _compiled[name]
    marker = _marker(name)
    with suppress(OSError):
        if marker is not None and marker.exists():
            return LOADING
    return COMPILING


def remember(name: str, seconds: float) -> None:
    """The kernels of this signature are ready, after this time. A folder that cannot be written is left alone."""
    _compiled[name] = seconds if name in _compiled else AGAIN * seconds
    if (marker := _marker(name)) is not None:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def forget(name: str) -> None:
    """The kernels of this signature do not work, so nobody should count on them."""
    _compiled.pop(name, None)
    if (marker := _marker(name)) is not None:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def _marker(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, "palimpsest", name) if folder and os.environ.get(DISK) != "0" else None


def keep_on_disk(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch keep kernels in a folder of this user, unless the environment names one. Only a program may do so.

    Without a folder that can be written, torch uses its own temporary one.
    """
    if environment.get(FOLDER):
        return
    try:
        home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home, "palimpsest", "kernels").absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # kernels are code: nobody else may write there
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # the latter without a home
        return
    environment[FOLDER] = str(folder)
