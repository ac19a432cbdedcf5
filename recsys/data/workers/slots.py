"""Shared memory between a reader process and the training process: slots that are made once and used again.

A batch is some 100 KB. Through a pipe it would go in pieces of 64 KB, and each piece waits until both
processes have had their turn; as new shared memory it would pay for every page anew. So a reader process
writes into slots of a segment that it keeps, sends only where (`Slot`), and the training process works on the
bytes where they are; the slot is free when nothing refers to them any more. A batch for which there is no
slot travels through the pipe: slower, never wrong.
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
_ROOM = 1.5
"""A segment has slots of this many times the batch that it was made for: others are a little longer."""


class Slot(NamedTuple):
    """Where the bytes of one batch are.

    Attributes:
        segment: name of the shared memory.
        number: of the slot; its state is byte `number` of the segment.
        start: first byte.
        size: bytes.
    """

    segment: str
    number: int
    start: int
    size: int


class Reserved(NamedTuple):
    """A slot and its memory, uint8 [size]."""

    slot: Slot
    memory: np.ndarray


class SlotWriter:
    """The end in the reader process.

    Args:
        num_slots: batches that may be on their way at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._header = -(-num_slots // _PAGE) * _PAGE
        self._slot_size = 0
        self._segment: SharedMemory | None = None
        self._possible = True

    def reserve(self, nbytes: int) -> "Reserved | None":
        """A free slot of so many bytes, to be filled and sent; None when there is none."""
        if nbytes > self._slot_size:
            self._grow(nbytes)
        if self._segment is None:
            return None
        held = _bytes(self._segment.buf)
        free = np.flatnonzero(held[: self._num_slots] == _FREE)
        if len(free) == 0:
            return None
        number = int(free[0])
        held[number] = _USED
        start = self._header + number * self._slot_size
        return Reserved(Slot(self._segment.name, number, start, nbytes), held[start : start + nbytes])

    def _grow(self, nbytes: int) -> None:
        """A new segment; the other process holds the old one for as long as it needs it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if not self._possible:
            return
        self._slot_size = -(-int(_ROOM * nbytes) // _PAGE) * _PAGE
        self._segment = _allocate(self._header + self._num_slots * self._slot_size)
        self._possible = self._segment is not None
        if self._segment is not None:
            # Of a batch that nobody took, the name is left. A process of multiprocessing has no `atexit`.
            Finalize(None, _remove, args=(self._segment,), exitpriority=0)


class SlotReader:
    """The end in the training process, for any number of reader processes."""

    def __init__(self) -> None:
        self._segments: dict[str, mmap.mmap] = {}

    def take(self, slot: Slot) -> np.ndarray:
        """The bytes in a slot, uint8 [size]. The slot is free when the array and all views of it are gone."""
        held = self._segments.get(slot.segment)
        if held is None:
            held = self._segments[slot.segment] = _attach(slot.segment)
        # An array that is nobody's view: views of it, and tensors on them, keep it alive.
        taken = np.frombuffer(held, np.uint8, slot.size, slot.start)
        weakref.finalize(taken, _free, held, slot.number).atexit = False
        return taken

    def close(self) -> None:
        """Lets go of the memory; what was taken stays as long as it is needed."""
        self._segments.clear()


def _attach(name: str) -> mmap.mmap:
    """All bytes of a segment, whose name goes now and its memory with the last process that has it open:
    nothing is left behind by a reader process that is killed."""
    # Not SharedMemory's own mapping, which has to be closed, and cannot be while an array lies in it.
    with open(_SHARED_MEMORY + name, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    segment = SharedMemory(name)
    segment.close()
    segment.unlink()
    return mapping


def _free(held: mmap.mmap, number: int) -> None:
    held[number] = _FREE


def _allocate(size: int) -> SharedMemory | None:
    """Shared memory that is really there, or None: writing to more than the system has would kill the
    process (a container often has 64 MB)."""
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
    """uint8 view of memory, which cannot be closed while the view lives."""
    return np.frombuffer(memory, np.uint8)
