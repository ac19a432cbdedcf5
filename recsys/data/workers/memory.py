"""Memory of a reader process: kept for the next row group, instead of given back and taken anew.

A reader allocates and frees the same megabytes all the time. The system clears each page that it gives, and
on a virtual machine that costs more than what is then written there.
"""

import ctypes

import pyarrow as pa

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3), from glibc's malloc.h."""

_KEPT = 1 << 30
_GROWTH = 1 << 26
_LARGEST = 1 << 25
"""Bytes: of free memory that is kept, of a step by which it grows, and of the largest piece that is taken out
of it (glibc allows no more than 32 MiB)."""


def keep() -> None:
    """From now on this process keeps the memory that it frees, up to 1 GiB. Without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_TOP_PAD, _GROWTH)
    # Arrow's own pools give back what was not used for some milliseconds, about as long as a row group takes.
    pa.set_memory_pool(pa.system_memory_pool())
