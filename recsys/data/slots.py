"""Shared memory between a reader process and the training process: slots that are made once and used again.

A batch is some 100 KB. Through a pipe it would go in pieces of 64 KB, and each piece waits until both
processes have had their turn; as new shared memory it would pay for every page anew. So a reader process
writes into slots of a segment that it keeps, sends only where (`Slot`), and the training process copies the
bytes out and frees the slot. A batch for which there is no slot travels through the pipe: slower, never
wrong.
"""

import os
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from typing import NamedTuple

import numpy as np

_FREE, _USED = 0, 1
_PAGE = 4096
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

    def put(self, data: np.ndarray) -> Slot | None:
        """Copies `data`, uint8 [n], into a free slot; None when there is none."""
        if data.nbytes > self._slot_size:
            self._grow(data.nbytes)
        if self._segment is None:
            return None
        held = _bytes(self._segment)
        free = np.flatnonzero(held[: self._num_slots] == _FREE)
        if len(free) == 0:
            return None
        number = int(free[0])
        start = self._header + number * self._slot_size
        held[start : start + data.nbytes] = data
        held[number] = _USED
        return Slot(self._segment.name, number, start, data.nbytes)

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
        self._segments: dict[str, SharedMemory] = {}

    def take(self, slot: Slot) -> np.ndarray:
        """A copy of the bytes in a slot, uint8 [size], which is free then."""
        segment = self._segments.get(slot.segment)
        if segment is None:
            segment = self._segments[slot.segment] = SharedMemory(slot.segment)
            # The name goes now, the memory with the last process that has it open: nothing is left behind by
            # a reader process that is killed.
            segment.unlink()
        held = _bytes(segment)
        data = held[slot.start : slot.start + slot.size].copy()
        held[slot.number] = _FREE
        return data

    def close(self) -> None:
        """Lets go of the memory."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def _allocate(size: int) -> SharedMemory | None:
    """Shared memory that is really there, or None: writing to more than the system has would kill the
    process (a container often has 64 MB)."""
    segment = None
    try:
        segment = SharedMemory(create=True, size=size)
        with open(f"/dev/shm/{segment.name}", "r+b") as file:
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


def _bytes(segment: SharedMemory) -> np.ndarray:
    """uint8 view of a segment, which cannot be closed while the view lives."""
    return np.frombuffer(segment.buf, np.uint8)
