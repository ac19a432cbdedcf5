"""The synchronisation of a warp-specialised Hopper program on a CPU: partitions, barriers, copies, products.

Partitions (warp groups and loading warps) are threads of which one runs at a time, until it has to wait. When
none can go on, the program has deadlocked. Everything happens as early as it can; what could happen later on
a GPU is found by bookkeeping instead of by chance.

Each party that touches shared memory has a component in vector clocks: a partition, the copies that a barrier
counts, the products of a partition, its copies out of shared memory. Two accesses to the same bytes, at least
one of them a write, are a race unless the clock at the second knows of the first. Barriers hand the clocks of
those who arrive to those who wait, and a wait learns only of the earliest phase that could have let it
through. So a missing wait or signal is found in whatever order the partitions happen to run, in every case
where it matters.

Not modelled: the warps within a partition (the compiler puts barriers between them), races in global memory,
registers, speed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.tools.gluon_clocks import (
    Aborted,
    Barrier,
    Clock,
    Deadlock,
    HardwareBarrier,
    Partition,
    Race,
    covers,
    join,
)
from tests.tools.gluon_values import Block, raw

MOST_STEPS = 1_000_000
"""Waits and signals after which a program is taken for endless."""


class Memory:
    """A buffer in shared memory, or a view of one."""

    def __init__(
        self,
        machine: Machine,
        data: torch.Tensor,
        layout: Any = None,
        accesses: Any = None,
        barriers: Any = None,
    ) -> None:
        self.machine, self.data, self.layout, self.barriers = machine, data, layout, barriers
        self.accesses: dict[tuple[int, int, int, bool, int], int] = {} if accesses is None else accesses
        """Epochs by first byte, last byte, party, whether it writes, and the party's `fenced` or 0."""

    def view(self, data: torch.Tensor, barriers: Any = None) -> Memory:
        return Memory(self.machine, data, self.layout, self.accesses, barriers)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def index(self, index: Any) -> Memory:
        i = int(raw(index))
        assert 0 <= i < self.data.shape[0]
        return self.view(self.data[i], None if self.barriers is None else [self.barriers[i]])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self.view(self.data.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Memory:
        return self.view(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return self.view(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        start = self.data.view(-1).view(dtype)[: torch.Size(shape).numel()]  # it may be larger
        return self.view(start.view(shape))

    def store(self, value: Block) -> None:
        assert self.data.shape == value.data.shape and self.data.dtype == value.data.dtype
        running = self.machine.running
        self.touch("a store", running.party, running.clock[running.party], writes=True, fenced=running.fenced)
        self.data.copy_(value.data)

    def load(self, layout: Any) -> Block:
        running = self.machine.running
        self.touch("a load", running.party, running.clock[running.party], writes=False, fenced=running.fenced)
        return Block(self.data.clone(), layout)

    def touch(self, what: str, party: int, epoch: int, *, writes: bool, fenced: int = 0) -> None:
        """Notes an access by `party` in its `epoch`, after it has been compared with those before.

        `fenced` is 0 for the asynchronous proxy: it must not meet a store that no fence has followed.
        """
        first = self.data.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(self.data.shape, self.data.stride(), strict=True)) + 1
        last = first + extent * self.data.element_size() - 1
        clock, covered, was_written = self.machine.running.clock, [], writes
        for key, before in self.accesses.items():
            low, high, who, wrote, fence = key
            if low > last or high < first:
                continue
            was_written |= wrote
            if writes or wrote:
                if clock.get(who, 0) < before:
                    raise Race(
                        f"{what} of {self.machine.running.name} meets {'a write' if wrote else 'a read'}"
                    )
                if wrote and fence and not fenced and clock.get(fence, 0) < before:
                    raise Race(f"{what} of {self.machine.running.name}: no fence since a store")
            if writes and first <= low and high <= last:
                covered.append(key)
        if not was_written:
            raise Race(f"{what} of {self.machine.running.name}: nobody has written there")
        for key in covered:
            del self.accesses[key]
        self.accesses[first, last, party, writes, fenced] = epoch


class Pending(Block):
    """A product that has been started, number `number` of its partition: its numbers are not there yet."""

    def __init__(self, result: Block, number: int) -> None:
        self.result, self.number, self.type = result, number, result.type

    @property
    def data(self) -> Any:
        raise Race("a product is used that nobody has waited for")


class Machine:
    """One program: everything that its partitions share. `seed` says in which order they run."""

    def __init__(self, seed: int, program: int = 0, programs: int = 1, warps: int = 4) -> None:
        self.random = random.Random(seed)
        self.program, self.programs = program, programs
        self.parties = itertools.count(1)
        self.steps = 0
        self.failure: BaseException | None = None
        self.hardware: dict[int, HardwareBarrier] = {}
        self.running = Partition(self.parties, "the kernel", warps, {})
        self.partitions: list[Partition] = []

    # Who runs

    def step(self) -> None:
        self.steps += 1
        assert self.steps < MOST_STEPS, "the program does not come to an end"

    def next_partition(self) -> Partition:
        waiting = [partition for partition in self.partitions if not partition.finished]
        able = [partition for partition in waiting if partition.ready is None or partition.ready()]
        if not able:
            raise Deadlock(
                "; ".join(f"{partition.name} waits for {partition.waits_for}" for partition in waiting)
            )
        return self.random.choice(able)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        self.step()
        if ready():
            return
        running = self.running
        if not self.partitions:
            raise Deadlock(f"{running.name} waits for {what}")
        running.ready, running.waits_for = ready, what
        following = self.next_partition()
        following.baton.release()
        running.baton.acquire()
        if self.failure is not None:
            raise Aborted
        self.running, running.ready = running, None

    def specialize(self, functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> None:
        """Runs each function in a partition; the first has the warps of the kernel itself."""
        root = self.running
        started: Clock = {}
        root.release(started)
        warps = [root.warps, *worker_num_warps]
        assert len(worker_num_regs) == len(worker_num_warps)
        self.partitions = [
            Partition(self.parties, f"{function.__name__} {number}", count, started)
            for number, ((function, _), count) in enumerate(zip(functions_and_args, warps, strict=True))
        ]
        threads = [
            threading.Thread(target=self._work, args=(partition, *job), name=partition.name)
            for partition, job in zip(self.partitions, functions_and_args, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.next_partition().baton.release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for partition in self.partitions:
            join(root.clock, partition.clock)
        self.partitions, self.running = [], root

    def _work(self, partition: Partition, function: Any, arguments: Any) -> None:
        partition.baton.acquire()
        try:
            if self.failure is None:
                self.running = partition
                function(*arguments)
                partition.finish()
                partition.finished = True
                if not all(partition.finished for partition in self.partitions):
                    self.next_partition().baton.release()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            if self.failure is None:
                self.failure = error
                for waiting in self.partitions:
                    waiting.baton.release()

    # mbarrier

    def init(self, mbarrier: Memory, count: int) -> None:
        barrier, running = mbarrier.barriers[0], self.running
        assert barrier.count == 0, "a barrier is set up twice"
        barrier.count = barrier.pending = count
        barrier.set_up = {running.fenced: running.clock[running.party]}

    def wait(self, mbarrier: Memory, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if not bool(raw(pred)):
            return
        parity, barrier, running = int(raw(phase)), self._ready(mbarrier), self.running
        assert parity in (0, 1)
        known = barrier.known(running.clock)
        target = known if known % 2 != parity else known + 1
        self.wait_until(
            lambda: barrier.phase >= target, f"a barrier in phase {barrier.phase}, parity {parity}"
        )
        assert barrier.phase == target, "a phase has ended before the wait for the one before it"
        join(running.clock, barrier.history[target])
        barrier.waited[running.party] = running.clock[running.party]

    def expect(self, mbarrier: Memory, bytes: int, pred: Any = True) -> None:
        if bool(raw(pred)):
            self._ready(mbarrier).bytes += bytes
            self.arrive(mbarrier)

    def arrive(self, mbarrier: Memory, *, count: int = 1, pred: Any = True) -> None:
        if not bool(raw(pred)):
            return
        self.step()
        barrier = self._ready(mbarrier)
        barrier.arrive(self.running)
        barrier.pending -= count
        barrier.settle()

    def _ready(self, mbarrier: Memory) -> Barrier:
        barrier = mbarrier.barriers[0]
        assert barrier.count > 0, "a barrier that is not set up"
        return barrier

    # Hardware barriers

    def named_barrier(self, number: int, threads: int, waits: bool) -> None:
        self.step()
        barrier, running = self.hardware.setdefault(number, HardwareBarrier()), self.running
        phase = barrier.arrive_with(running, threads)
        if waits:
            self.wait_until(lambda: barrier.phase >= phase, f"hardware barrier {number}")
            join(running.clock, barrier.history[phase])

    # Copies through descriptors

    def copy_in(
        self, tensor_desc: Any, coord: list[Any], barrier: Memory, result: Memory, pred: Any = True
    ) -> None:
        if not bool(raw(pred)):
            return
        mbarrier = self._ready(barrier)
        assert covers(self.running.clock, mbarrier.set_up), "no fence since a barrier's init"
        offset, inside = box(tensor_desc, coord)
        flat = torch.as_strided(tensor_desc.base, (tensor_desc.elements,), (1,))
        assert (offset[inside] >= 0).all() and (offset[inside] < tensor_desc.elements).all()
        assert result.data.shape == offset.shape and result.dtype == flat.dtype
        result.touch("a copy", mbarrier.party, mbarrier.phase + 1, writes=True)
        mbarrier.arriving[mbarrier.party] = mbarrier.phase + 1
        values = flat[offset.clamp(0, tensor_desc.elements - 1)]
        result.data.copy_(torch.where(inside, values, torch.zeros_like(values)))
        mbarrier.bytes -= result.data.numel() * result.data.element_size()
        mbarrier.settle()

    def copy_out(self, tensor_desc: Any, coord: list[Any], src: Memory) -> None:
        self._copy_out(tensor_desc, coord, src, adds=False)

    def copy_add(self, tensor_desc: Any, coord: list[Any], src: Memory) -> None:
        self._copy_out(tensor_desc, coord, src, adds=True)

    def _copy_out(self, descriptor: Any, coordinates: list[Any], memory: Memory, *, adds: bool) -> None:
        offset, inside = box(descriptor, coordinates)
        flat = torch.as_strided(descriptor.base, (descriptor.elements,), (1,))
        assert memory.data.shape == offset.shape and memory.dtype == flat.dtype
        assert (offset[inside] >= 0).all() and (offset[inside] < descriptor.elements).all()
        self.running.num_stores += 1
        memory.touch("a copy", self.running.stores, self.running.num_stores, writes=False)
        flat[offset[inside]] = memory.data[inside] + (flat[offset[inside]] if adds else 0)

    def store_wait(self, pendings: int) -> None:
        running = self.running
        done = max(running.num_stores - pendings, running.clock.get(running.stores, 0))
        running.clock[running.stores] = done

    def fence(self) -> None:
        """Shows the asynchronous proxy all stores that are known of here."""
        running = self.running
        for partition in (*self.partitions, running):
            known = running.clock.get(partition.party, 0)
            running.clock[partition.fenced] = max(running.clock.get(partition.fenced, 0), known)
        running.clock[running.party] += 1

    # Products

    def product(self, a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        running = self.running
        running.num_products += 1
        for operand in (a, b):
            if isinstance(operand, Memory):
                operand.touch("a product", running.products, running.num_products, writes=False)
        left, right = a.data.float(), b.data.float()
        assert torch.isfinite(left).all() and torch.isfinite(right).all(), "an operand that is infinite"
        base = acc.result if isinstance(acc, Pending) else acc
        total = left @ right
        result = Block(total + base.data if use_acc else total, base.type.layout)
        product = Pending(result, running.num_products)
        return product if is_async else self.product_wait(0, (product,))

    def product_wait(self, num_outstanding: int = 0, deps: Any = None) -> Any:
        """Products that are still pending can only be added to."""
        running = self.running
        done = max(running.num_products - num_outstanding, running.clock.get(running.products, 0))
        running.clock[running.products] = done
        results = [dep.result if isinstance(dep, Pending) and dep.number <= done else dep for dep in deps]
        return results[0] if len(results) == 1 else tuple(results)


def box(descriptor: Any, coordinates: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the elements of a box from the tensor's start, and whether they are in bounds."""
    size, first, inside_so_far = descriptor.base.element_size(), 0, True
    offset, inside = torch.zeros([1] * len(coordinates), dtype=torch.int64), torch.tensor(True)
    for axis, (start, extent) in enumerate(zip(coordinates, descriptor.block_shape, strict=True)):
        place, stride = int(raw(start)), descriptor.strides[axis] * size
        assert -(2**31) <= place < 2**31
        if extent == 1:
            first += place * stride
            inside_so_far = inside_so_far and 0 <= place < descriptor.shape[axis]
            continue
        shape = [-1 if dim == axis else 1 for dim in range(len(coordinates))]
        at = torch.arange(place, place + extent, dtype=torch.int64).view(shape)
        inside = inside & (at >= 0) & (at < descriptor.shape[axis])
        offset = offset + at * stride  # wraps around like an address
    offset = offset + ((first + 2**63) % 2**64 - 2**63)
    inside = inside & inside_so_far
    return torch.div(offset, size, rounding_mode="floor"), inside
