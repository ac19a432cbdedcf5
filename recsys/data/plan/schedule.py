"""Lists the batches that a rank reads, epoch after epoch. Reader processes use it, so it imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from recsys.data.plan.epoch import EpochPlan


@dataclass(frozen=True)
class BatchSchedule:
    """Yields (epoch, index) of a rank's batches, starting at batch `start` of `epoch`, until an epoch has no
    batch for the rank.

    Attributes:
        plan: returns the plan of an epoch.
        epoch: the first epoch.
        start: the first batch in it, over all ranks.
        rank: number of this rank.
        world_size: number of ranks.
    """

    plan: Callable[[int], EpochPlan]
    epoch: int
    start: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start = self.start
        for epoch in count(self.epoch):
            indices = batches_of_rank(self.plan(epoch), start, self.rank, self.world_size)
            if not indices:
                return
            yield from ((epoch, index) for index in indices)
            start = 0


@dataclass(frozen=True)
class RepeatedSchedule:
    """Yields (0, index) of the same batches of the first epoch, over and over without end.

    Attributes:
        indices: the batches, at least one.
    """

    indices: range

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            yield from ((0, index) for index in self.indices)


def batches_of_rank(plan: EpochPlan, start: int, rank: int, world_size: int) -> range:
    """Returns a rank's batches of an epoch: every world_size-th batch, starting at `start` + `rank`."""
    return range(start + rank, plan.num_batches, world_size)
