"""Is there room? Memory and disk are looked at before work begins, so that hours of it do not end in a crash."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import torch

from palimpsest.errors import ResourceError

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
RESERVE = 64 << 20  # bytes of disk that stay free: what surrounds the work writes too


def available_memory() -> int:
    """Bytes that this process may still take: what the machine, its container and its limits leave."""
    return max(0, min(_machine(), _container(), _limit()))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. On a CPU, torch raises a plain RuntimeError.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    said = str(error)
    told = "DefaultCPUAllocator" in said or "not enough memory" in said
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and told)


def _machine() -> int:
    try:
        lines = MEMORY_INFO.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container() -> int:
    try:
        most, used, detail = (
            (CONTAINER / f"memory.{name}").read_text(encoding="utf-8") for name in ("max", "current", "stat")
        )
        cached = next(int(line.split()[1]) for line in detail.splitlines() if line.startswith("inactive_file "))
        return int(most) - int(used) + cached  # files that were read are counted as used, but make way
    except (OSError, ValueError, StopIteration):  # no container, or one without a limit ("max")
        return sys.maxsize


def _limit() -> int:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    except OSError:
        taken = 0
    return sys.maxsize if most == resource.RLIM_INFINITY else most - taken


def require_memory(needed: int, *, of: str, remedy: str) -> None:
    """Refuse work that needs more memory than there is.

    >>> require_memory(1 << 60, of="a reconstruction", remedy="use fewer candidates")
    Traceback (most recent call last):
        ...
    palimpsest.errors.ResourceError: a reconstruction needs about 1,152,922 TB of memory, ...; use fewer candidates
    """
    available = available_memory()
    if needed > available:
        raise ResourceError(f"{of} needs about {size(needed)} of memory, but {size(available)} are free; {remedy}")


def require_disk(folder: Path | str, needed: int, *, of: str) -> None:
    """Refuse work that will write more than the folder's disk has room for."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed + RESERVE > free:
        raise ResourceError(f"{of} needs about {size(needed + RESERVE)} of disk, but {folder} has {size(free)};"
                            " make room or choose a folder on another disk")  # fmt: skip


def size(count: int) -> str:
    """Bytes as one says them.

    >>> size(999), size(1_500_000), size(23_000_000_000)
    ('1 kB', '1.5 MB', '23 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:,.0f} {unit}" if count >= 10 * scale else f"{count / scale:.1f} {unit}"
    return f"{max(1, round(count / 1e3))} kB"
