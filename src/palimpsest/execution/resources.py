"""Devices, free memory and disk. Work that does not fit is refused before it begins."""

import os
import resource
import shutil
import sys
from pathlib import Path

import torch

from palimpsest.errors import ResourceError

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
RESERVE = 64 << 20  # bytes of disk that stay free for other programs


def chosen(device: torch.device | str) -> torch.device:
    """The device. ``"auto"`` is CUDA if this machine has it."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if device == "auto" else device)


def available_memory() -> int:
    """Bytes that this process may still take within the limits of machine, container and process."""
    return max(0, min(_machine(), _container(), _limit()))


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a CPU, torch raises a plain RuntimeError.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    on_cpu = "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and on_cpu)


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
        return int(most) - int(used) + cached  # cached files count as used, but the kernel frees them
    except (OSError, ValueError, StopIteration):  # not in a container, or without a limit ("max")
        return sys.maxsize


def _limit() -> int:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    except OSError:
        taken = 0
    return sys.maxsize if most == resource.RLIM_INFINITY else most - taken


def require_memory(needed: int, *, of: str, remedy: str) -> None:
    """Refuse work that needs more memory than there is."""
    available = available_memory()
    if needed > available:
        raise ResourceError(f"{of} needs about {size(needed)} of memory, but {size(available)} are free; {remedy}")


def require_disk(folder: Path | str, needed: int, *, of: str) -> None:
    """Refuse work that writes more than fits on the folder's disk."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed + RESERVE > free:
        there = f"needs about {size(needed + RESERVE)} of disk, but {folder} has {size(free)}"
        raise ResourceError(f"{of} {there}; free some space or choose a folder on another disk")


def size(count: int) -> str:
    """Bytes in a readable unit.

    >>> size(999), size(1_500_000), size(23_000_000_000)
    ('1 kB', '1.5 MB', '23 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:,.0f} {unit}" if count >= 10 * scale else f"{count / scale:.1f} {unit}"
    return f"{max(1, round(count / 1e3))} kB"
