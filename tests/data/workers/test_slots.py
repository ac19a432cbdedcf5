"""Shared memory between processes: every byte arrives, slots are used again, nothing is left behind."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.data.workers import slots
from recsys.data.workers.slots import Slot, SlotReader, SlotWriter

SHARED_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm on this system")


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def put(writer: SlotWriter, data: np.ndarray) -> Slot | None:
    reserved = writer.reserve(data.nbytes)
    if reserved is None:
        return None
    reserved.memory[:] = data
    return reserved.slot


def test_bytes_arrive_and_stay() -> None:
    writer, reader = SlotWriter(5), SlotReader()
    sent = [noise(size, size) for size in (10_000, 0, 1, 14_999, 4096)]
    received = [reader.take(put(writer, data)) for data in sent]
    reader.close()
    for data, got in zip(sent, received, strict=True):
        np.testing.assert_array_equal(got, data)


def test_a_slot_is_not_free_while_a_tensor_lies_in_it() -> None:
    writer, reader = SlotWriter(1), SlotReader()
    taken = reader.take(put(writer, noise(4096)))
    tensor = torch.from_numpy(taken[8:24].view(np.int64))[1:]
    expected = noise(4096)[16:24].view(np.int64)
    del taken
    assert writer.reserve(4096) is None
    assert tensor.tolist() == expected.tolist()
    del tensor
    assert writer.reserve(4096) is not None
    reader.close()


def test_small_batches_have_more_slots() -> None:
    """A slot for 4,000 bytes takes two pages, so 40,000 bytes hold four; large batches have the two asked."""
    writer, reader = SlotWriter(2, num_bytes=40_000), SlotReader()
    small = [reader.take(put(writer, noise(4_000, seed))) for seed in range(4)]
    assert writer.num_more == 2
    assert put(writer, noise(4_000)) is None
    large = [reader.take(put(writer, noise(30_000, seed))) for seed in range(2)]
    assert writer.num_more == 0
    assert put(writer, noise(30_000)) is None
    reader.close()
    for size, taken in ((4_000, small), (30_000, large)):
        for seed, got in enumerate(taken):
            np.testing.assert_array_equal(got, noise(size, seed))


def test_a_slot_is_taken_once_until_it_is_freed() -> None:
    writer, reader = SlotWriter(2), SlotReader()
    first, second = put(writer, noise(100, 1)), put(writer, noise(100, 2))
    assert {first.number, second.number} == {0, 1}
    assert put(writer, noise(100, 3)) is None
    np.testing.assert_array_equal(reader.take(second), noise(100, 2))
    third = put(writer, noise(100, 3))
    assert third.number == second.number
    np.testing.assert_array_equal(reader.take(first), noise(100, 1))
    np.testing.assert_array_equal(reader.take(third), noise(100, 3))
    reader.close()


def test_what_lies_in_a_segment_survives_its_replacement() -> None:
    writer, reader = SlotWriter(3), SlotReader()
    small = [put(writer, noise(5_000, 1)), put(writer, noise(5_000, 2))]
    big = put(writer, noise(50_000, 3))
    assert big.segment != small[0].segment
    np.testing.assert_array_equal(reader.take(small[0]), noise(5_000, 1))
    np.testing.assert_array_equal(reader.take(big), noise(50_000, 3))
    np.testing.assert_array_equal(reader.take(small[1]), noise(5_000, 2))
    reader.close()


def test_without_memory_nothing_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before = set(os.listdir(SHARED_MEMORY))
    monkeypatch.setattr(slots.os, "posix_fallocate", full)
    writer = SlotWriter(2)
    assert put(writer, noise(100)) is None
    assert put(writer, noise(100_000)) is None
    assert set(os.listdir(SHARED_MEMORY)) == before


def _write_and_wait(connection) -> None:
    writer = SlotWriter(2)
    connection.send(put(writer, noise(1000)))
    signal.pause()


def _write_and_end(connection) -> None:
    writer = SlotWriter(2)
    connection.send([put(writer, noise(1000)), put(writer, noise(10_000))])


def test_a_writer_takes_away_what_nobody_took() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_and_end, args=(theirs,))
    process.start()
    sent = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert not [slot for slot in sent if (SHARED_MEMORY / slot.segment).exists()]


def test_a_killed_writer_leaves_nothing_behind() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_and_wait, args=(theirs,))
    process.start()
    slot = ours.recv()
    assert (SHARED_MEMORY / slot.segment).exists()
    reader = SlotReader()
    np.testing.assert_array_equal(reader.take(slot), noise(1000))
    process.kill()
    process.join()
    assert not (SHARED_MEMORY / slot.segment).exists()
    reader.close()
