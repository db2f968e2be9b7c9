"""Memory of this process as the kernel counts it, with large blocks of memory mapped one by one so that what is freed is gone."""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 262144


def map_large_blocks() -> None:
    """Map and unmap every large block by itself from now on, so that peak RSS measures the program and not glibc."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_MAPPED_BYTES)  # tells engines that the user has chosen


def reset_peak() -> None:
    """Let the peak, VmHWM, begin at what is there now."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")


def status_bytes(field: str) -> int:
    """A line of /proc/self/status, such as VmRSS, in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024
