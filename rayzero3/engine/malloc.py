"""malloc: let freed memory stay with the process, where the C library is glibc.

The engine frees and allocates buffers of many MB in every step. By default glibc returns such memory to the system at once and takes it
anew, zeroed page by page at the first touch: hundreds of thousands of page faults a step, more than the sums themselves cost. On a GPU
the allocator of torch keeps its memory anyway.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 * 2**20
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed. Returns whether it does; the user's own MALLOC_* variables win, and other C libraries are left alone.

    Cost: the process's resident memory stays at its peak.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _PAD_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])
