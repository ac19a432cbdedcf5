"""Which batches are a rank's, epoch after epoch. It travels to reader processes, so it knows no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from recsys.data.workers.reader import Reader


@dataclass(frozen=True)
class Places:
    """(epoch, index) of a rank's batches from batch `start` of an epoch on, until an epoch has none."""

    reader: Reader
    epoch: int
    start: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start = self.start
        for epoch in count(self.epoch):
            found = indices(self.reader, epoch, start + self.rank, self.world_size)
            if not found:
                return
            yield from ((epoch, index) for index in found)
            start = 0


def indices(reader: Reader, epoch: int, first: int, step: int) -> range:
    """Batches of an epoch, every `step`th from `first` on."""
    return range(first, reader.plan(epoch).num_batches, step)
