"""Passes batches from a reader process to the training process in slots of shared memory that are reused.

A batch has about 100 KB. A pipe passes it in pieces of 64 KB, and each piece waits until both processes have
been scheduled; new shared memory pays for every page again. So a reader process writes into slots of a
segment that it keeps, and sends only the address (`Slot`). The training process works on the bytes in place;
a slot becomes free when nothing refers to its bytes any more. A batch that finds no free slot goes through
the pipe, which is slower.
"""

import mmap
import os
import weakref
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from typing import NamedTuple

import numpy as np

_FREE, _USED = 0, 1
_PAGE = 4096
_SHARED_MEMORY = "/dev/shm/"
_SPARE = 1.5
"""Size of a slot relative to the batch that it was allocated for, because later batches may be larger."""
_MOST_SLOTS = 64
"""Small batches get no more slots than these."""


class Slot(NamedTuple):
    """The address of one batch's bytes.

    Attributes:
        segment: name of the shared memory segment.
        number: number of the slot; byte `number` of the segment holds its state.
        start: first byte of the batch in the segment.
        size: number of bytes of the batch.
    """

    segment: str
    number: int
    start: int
    size: int


class ReservedSlot(NamedTuple):
    """A slot and its memory, uint8 [size]."""

    slot: Slot
    memory: np.ndarray


class SlotWriter:
    """Writes batches into slots, in a reader process.

    Args:
        num_slots: number of slots, the most batches that can be in use at a time.
        num_bytes: if batches are so small that more slots fit into these bytes, there are more.

    Attributes:
        num_more: number of slots beyond `num_slots`; 0 before the first batch.
    """

    def __init__(self, num_slots: int, num_bytes: int = 0) -> None:
        self._num_slots, self._num_bytes, self.num_more = num_slots, num_bytes, 0
        self._header = -(-max(num_slots, _MOST_SLOTS) // _PAGE) * _PAGE
        self._slot_size = 0
        self._segment: SharedMemory | None = None
        self._possible = True

    def reserve(self, nbytes: int) -> "ReservedSlot | None":
        """Returns a free slot of `nbytes` bytes, to be filled and sent, or None if no slot is free."""
        if nbytes > self._slot_size:
            self._grow(nbytes)
        if self._segment is None:
            return None
        buffer = _bytes(self._segment.buf)
        free = np.flatnonzero(buffer[: self._num_slots + self.num_more] == _FREE)
        if len(free) == 0:
            return None
        number = int(free[0])
        buffer[number] = _USED
        start = self._header + number * self._slot_size
        return ReservedSlot(Slot(self._segment.name, number, start, nbytes), buffer[start : start + nbytes])

    def _grow(self, nbytes: int) -> None:
        """Allocates a larger segment; the training process keeps the old one for as long as it needs it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if not self._possible:
            return
        self._slot_size = -(-int(_SPARE * nbytes) // _PAGE) * _PAGE
        most = min(_MOST_SLOTS, self._num_bytes // self._slot_size)
        for num_slots in dict.fromkeys((max(most, self._num_slots), self._num_slots)):
            self.num_more = num_slots - self._num_slots
            self._segment = _allocate(self._header + num_slots * self._slot_size)
            if self._segment is not None:
                break
        self._possible = self._segment is not None
        if self._segment is not None:
            # A segment whose batches were never taken still has its name, which this removes at the end of
            # the process, where `atexit` would not run.
            Finalize(None, _remove, args=(self._segment,), exitpriority=0)


class SlotReader:
    """Reads batches from slots, in the training process, for any number of reader processes."""

    def __init__(self) -> None:
        self._segments: dict[str, mmap.mmap] = {}

    def take(self, slot: Slot) -> np.ndarray:
        """Returns the bytes in a slot, uint8 [size]; the slot is free when all views of them are gone."""
        mapped = self._segments.get(slot.segment)
        if mapped is None:
            mapped = self._segments[slot.segment] = _attach(slot.segment)
        # This array is not a view of another array, so views of it, and tensors on them, keep it alive.
        taken = np.frombuffer(mapped, np.uint8, slot.size, slot.start)
        weakref.finalize(taken, _free, mapped, slot.number).atexit = False
        return taken

    def close(self) -> None:
        """Releases the memory; arrays that were taken keep their memory."""
        self._segments.clear()


def _attach(name: str) -> mmap.mmap:
    """Maps a segment and removes its name, so that its memory is freed with the last process that has it
    open.

    A reader process that is killed then leaves nothing behind.
    """
    # SharedMemory would have to close its own mapping, which is impossible while an array refers to it.
    with open(_SHARED_MEMORY + name, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    segment = SharedMemory(name)
    segment.close()
    segment.unlink()
    return mapping


def _free(segment: mmap.mmap, number: int) -> None:
    segment[number] = _FREE


def _allocate(size: int) -> SharedMemory | None:
    """Allocates shared memory that is backed by real pages, or returns None.

    Writing to more shared memory than the system has would kill the process; a container often has 64 MB.
    """
    segment = None
    try:
        segment = SharedMemory(create=True, size=size)
        with open(_SHARED_MEMORY + segment.name, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        if segment is not None:
            segment.close()
            segment.unlink()
        return None
    return segment


def _remove(segment: SharedMemory) -> None:
    with suppress(FileNotFoundError):
        segment.unlink()


def _bytes(memory: memoryview | mmap.mmap) -> np.ndarray:
    """Views memory as uint8; the memory cannot be closed while the view exists."""
    return np.frombuffer(memory, np.uint8)
