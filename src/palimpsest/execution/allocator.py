"""Memory that is freed and asked for again at every step should not go back to the system in between."""

from __future__ import annotations

import ctypes
import functools
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


@functools.cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 32 MiB for reuse; whether it could be asked.

    By default it returns them and gets them back page by page: a thousand page faults, a third of a step, on a CPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 64 << 20}
    return min(mallopt(name, value) for name, value in settings.items()) > 0
