"""Vector clocks of a program that `gluon_machine` runs, and the barriers that hand them on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

Clock = dict[int, int]
"""For each party, up to which of its epochs everything is known to have happened."""

WARP = 32
"""Threads of a warp."""


class Aborted(Exception):
    """Another partition failed."""


class Race(AssertionError):
    """Two accesses to the same shared memory that nothing orders."""


class Deadlock(AssertionError):
    """No partition can go on."""


def join(clock: Clock, later: Clock) -> None:
    """Adds what `other` knows to `clock`."""
    for party, epoch in later.items():
        if epoch > clock.get(party, 0):
            clock[party] = epoch


def covers(clock: Clock, earlier: Clock) -> bool:
    """True if `clock` knows everything that `other` knows."""
    return all(clock.get(party, 0) >= epoch for party, epoch in earlier.items())


class Partition:
    """The warps that run one function of the kernel together.

    Attributes:
        clock: what is known to have happened, as seen from here.
        party, fenced: components of clocks. Accesses by `party` up to the epoch of `fenced` are visible to
            the asynchronous proxy (copies and products), not only to loads and stores.
        products, stores: components for what has been started here; `num_products` and `num_stores` of them.
    """

    def __init__(self, parties: Iterator[int], name: str, warps: int, clock: Clock) -> None:
        self.name, self.warps = name, warps
        self.party, self.fenced, self.products, self.stores = (next(parties) for _ in range(4))
        self.clock = {**clock, self.party: 1}
        self.num_products = self.num_stores = 0
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.finished = False

    def release(self, clock: Clock) -> None:
        """Lets those who will know `clock` know of everything up to here."""
        join(clock, self.clock)
        self.clock[self.party] += 1

    def finish(self) -> None:
        assert self.clock.get(self.products, 0) == self.num_products, "products that nothing waits for"
        assert self.clock.get(self.stores, 0) == self.num_stores, "copies that nothing waits for"


class Phases:
    """The clocks of a barrier's completed phases, each joined from all who arrived, and of the next phase."""

    def __init__(self) -> None:
        self.history: list[Clock] = [{}]
        self.arriving: Clock = {}

    @property
    def phase(self) -> int:
        """Number of completed phases."""
        return len(self.history) - 1

    def known(self, clock: Clock) -> int:
        """Number of phases whose completion follows from what `clock` knows."""
        number = self.phase
        while not covers(clock, self.history[number]):  # each phase knows all that the one before it does
            number -= 1
        return number

    def arrive(self, partition: Partition) -> None:
        assert covers(partition.clock, self.history[-1]), "an arrival may count for the phase before"
        partition.release(self.arriving)

    def complete(self) -> None:
        self.history.append(self.arriving)
        self.arriving = dict(self.arriving)


class Barrier(Phases):
    """An mbarrier; `party` are the copies that it counts.

    Attributes:
        waited: in which of its epochs a partition last waited here.
        set_up: the component and the epoch that a fence after `init` shows.
    """

    def __init__(self, parties: Iterator[int]) -> None:
        super().__init__()
        self.party = next(parties)
        self.count = self.pending = self.bytes = 0
        self.waited: Clock = {}
        self.set_up: Clock = {}

    def settle(self) -> None:
        """Completes the phase if nothing is missing."""
        assert self.pending >= 0, "more arrivals than the barrier expects"
        assert self.bytes >= 0, "more bytes than the barrier expects"
        if self.pending == 0 and self.bytes == 0:
            assert covers(self.arriving, self.waited), "a phase may end before a wait for the last one"
            self.complete()
            self.pending = self.count


class HardwareBarrier(Phases):
    """One of the sixteen barriers that are known by number."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = self.arrived = 0

    def arrive_with(self, partition: Partition, threads: int) -> int:
        """The number of the phase that `partition` takes part in."""
        assert self.arrived == 0 or self.threads == threads, "different numbers of threads at a barrier"
        self.threads, phase = threads, self.phase + 1
        self.arrive(partition)
        self.arrived += partition.warps * WARP
        assert self.arrived <= threads, "more threads than the barrier expects"
        if self.arrived == threads:
            self.complete()
            self.arrived = 0
        return phase
