"""Lets a reader process keep freed memory for the next row group, instead of returning it to the system.

A reader allocates and frees the same few megabytes again and again. The system clears each page that it hands
out, and on a virtual machine that costs more than filling the page.
"""

import ctypes

import pyarrow as pa

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3), from glibc's malloc.h."""

_KEPT = 1 << 30
_GROWTH = 1 << 26
_LARGEST = 1 << 25
"""mallopt thresholds in bytes: free memory to retain; heap growth step; largest allocation served from
the heap (at most 32 MiB in glibc)."""


def keep_freed_memory() -> None:
    """Makes this process keep up to 1 GiB of the memory that it frees. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_TOP_PAD, _GROWTH)
    # Arrow's own pools return memory after some milliseconds without use, and a row group takes that long.
    pa.set_memory_pool(pa.system_memory_pool())
