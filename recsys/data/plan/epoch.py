"""Plans the order of an epoch: the rows of batch k as a function of seed, epoch, row groups and settings.

The order does not depend on ranks or reader processes, so a run that is resumed with another number of them
continues with the same batches. Row groups are dealt to lanes; the rows of a few row groups of a lane are
mixed; lanes take turns. A reader that serves one lane out of n therefore reads one row group out of n, and
decodes each of its row groups once.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recsys.data.hashing import combine
from recsys.data.sources import RowGroup

_GROUPS, _ROWS = 1, 2
"""Hash streams that shuffle row groups and rows."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings that decide, together with the files, the order of rows.

    Attributes:
        batch_size: rows per batch; the last batch of a lane may have fewer.
        num_lanes: most independent streams; fewer are used if a lane would get fewer than
            `shuffle_row_groups` row groups.
        shuffle_row_groups: number of row groups whose rows are mixed. Not used without `shuffle`.
        seed: seed of the shuffle.
        shuffle: False keeps the order of files and rows within each lane.
    """

    batch_size: int
    num_lanes: int = 1
    shuffle_row_groups: int = 1
    seed: int = 0
    shuffle: bool = False


class BlockSlice(NamedTuple):
    """A slice of a block: its rows i with start <= i < stop."""

    block: int
    start: int
    stop: int


class PlanBlock(NamedTuple):
    """Row groups whose rows are mixed with each other: read in sequence, then permuted.

    Attributes:
        groups: indices of the row groups in the plan's list.
        order: int64 permutation of the concatenated rows; None keeps their order.
    """

    groups: list[int]
    order: np.ndarray | None


class EpochPlan:
    """The batches of one epoch. Each batch consists of one or more slices of blocks."""

    def __init__(self, groups: list[RowGroup], settings: PlanSettings, epoch: int) -> None:
        self.groups = groups
        self._settings = settings
        self._epoch = epoch
        self._lanes = self._deal()
        self._batch_lane, self._batch_place = _take_turns(
            [-(-int(lane.starts[-1]) // settings.batch_size) for lane in self._lanes]
        )

    @property
    def num_batches(self) -> int:
        """Number of batches of the epoch, over all ranks."""
        return len(self._batch_lane)

    @property
    def num_lanes(self) -> int:
        """Number of lanes in use."""
        return len(self._lanes)

    def batch(self, index: int) -> list[BlockSlice]:
        """Returns the rows of batch `index`, 0 <= index < num_batches, as slices of blocks."""
        lane = self._lanes[int(self._batch_lane[index])]
        first = int(self._batch_place[index]) * self._settings.batch_size
        last = min(first + self._settings.batch_size, int(lane.starts[-1]))
        slices = []
        place = int(np.searchsorted(lane.starts, first, side="right")) - 1
        while first < last:
            begin, end = int(lane.starts[place]), int(lane.starts[place + 1])
            slices.append(BlockSlice(lane.first_block + place, first - begin, min(last, end) - begin))
            first, place = min(last, end), place + 1
        return slices

    def block(self, number: int) -> PlanBlock:
        """Returns the block with the number `number`, as `BlockSlice.block` gives it."""
        lane = next(lane for lane in reversed(self._lanes) if lane.first_block <= number)
        members = lane.members[number - lane.first_block]
        if not self._settings.shuffle:
            return PlanBlock(members, None)
        rows = sum(self.groups[member].num_rows for member in members)
        hashes = combine(self._settings.seed, self._epoch, _ROWS, number, np.arange(rows))
        return PlanBlock(members, np.argsort(hashes, kind="stable"))

    def _deal(self) -> list["_Lane"]:
        """Deals row groups to lanes, and groups each lane's row groups into blocks in reading order."""
        numbers = np.asarray([i for i, group in enumerate(self.groups) if group.num_rows], np.int64)
        if self._settings.shuffle:
            order = np.argsort(combine(self._settings.seed, self._epoch, _GROUPS, numbers), kind="stable")
            numbers = numbers[order]
        dealt: list[list[int]] = [[] for _ in range(self._lane_count(len(numbers)))]
        # The next row group goes to the lane with the fewest rows, which fills lanes evenly.
        filled = [(0, lane) for lane in range(len(dealt))]
        for number in numbers.tolist():
            rows, lane = heapq.heappop(filled)
            dealt[lane].append(number)
            heapq.heappush(filled, (rows + self.groups[number].num_rows, lane))
        lanes, first_block = [], 0
        for members in dealt:
            blocks = [members[at : at + self._mixed] for at in range(0, len(members), self._mixed)]
            rows = [sum(self.groups[member].num_rows for member in block) for block in blocks]
            lanes.append(_Lane(first_block, blocks, np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])))
            first_block += len(blocks)
        return lanes

    @property
    def _mixed(self) -> int:
        return self._settings.shuffle_row_groups if self._settings.shuffle else 1

    def _lane_count(self, num_groups: int) -> int:
        # The count must divide num_lanes, so that a number of readers that divides num_lanes gets whole
        # lanes.
        if num_groups == 0:
            return 0
        limit = max(1, num_groups // self._mixed)
        return max(
            n
            for n in range(1, self._settings.num_lanes + 1)
            if self._settings.num_lanes % n == 0 and n <= limit
        )


class _Lane(NamedTuple):
    """An independent stream of blocks.

    Attributes:
        first_block: number of the lane's first block.
        members: row groups of each block.
        starts: int64 [blocks + 1], the row of the lane at which each block begins, and the end of the last.
    """

    first_block: int
    members: list[list[int]]
    starts: np.ndarray


def _take_turns(batches: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Orders batches so that lanes with batches left take turns.

    Returns:
        The lane of each batch, int64 [batches], and its index within the lane, int64 [batches].
    """
    lane = np.concatenate([np.full(n, i, np.int64) for i, n in enumerate(batches)] or [np.empty(0, np.int64)])
    place = np.concatenate([np.arange(n, dtype=np.int64) for n in batches] or [np.empty(0, np.int64)])
    order = np.lexsort((lane, place))
    return lane[order], place[order]


def resident_blocks(plan: EpochPlan, num_readers: int) -> int:
    """Returns the number of blocks that a reader of every num_readers-th batch uses at a time."""
    lanes = plan.num_lanes // max(1, math.gcd(plan.num_lanes, num_readers))
    # One more, because a batch on the border of two blocks needs both.
    return lanes + 1
