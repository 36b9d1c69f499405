"""Memory that was freed is kept for what comes next.

glibc hands large blocks back to the system as they are freed, and every next one is taken page by page
(`benchmarks/overheads.py` runs with freed memory kept).
"""

import ctypes
import platform

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)
LARGEST = 32 << 20  # bytes of a block, the most that glibc lets be kept


def keep_freed_memory() -> None:
    """For the whole process; where there is no glibc, nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.libc_ver()[0] == "glibc" else None
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
