"""The order of an epoch: which rows make up batch k, as a pure function of (seed, epoch, row groups, three
settings).

Neither ranks nor reader processes occur in it, so a run that is resumed with other numbers of them goes on
with the same batches. Row groups are dealt to lanes; the rows of a few row groups of a lane are mixed; lanes
take turns. A reader that serves one lane out of n therefore touches one row group out of n, and decodes each
of them once.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recsys.data.hashing import combine

_GROUPS, _ROWS = 1, 2
"""Streams of the hash: the order of row groups and the order of rows."""


class RowGroup(NamedTuple):
    """A run of rows of a file that is read at once: its file, its number there, the file's row it begins
    with."""

    file: int
    number: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Order:
    """What the order of rows depends on besides the files.

    Attributes:
        batch_size: rows of a batch; the last batch of a lane may have fewer.
        num_lanes: most independent streams; fewer are used when a lane would not get `shuffle_row_groups` row
            groups.
        shuffle_row_groups: row groups whose rows are mixed. Not used without `shuffle`.
        seed: of the shuffle.
        shuffle: False keeps the order of files and rows within each lane.
    """

    batch_size: int
    num_lanes: int = 1
    shuffle_row_groups: int = 1
    seed: int = 0
    shuffle: bool = False


class Part(NamedTuple):
    """Rows start <= i < stop of a block."""

    block: int
    start: int
    stop: int


class Block(NamedTuple):
    """Rows that are mixed with each other: row groups read one after the other, then put into another order.

    Attributes:
        groups: numbers of its row groups in the plan's list.
        order: int64 permutation of their rows laid end to end, or None to leave them.
    """

    groups: list[int]
    order: np.ndarray | None


class EpochPlan:
    """Batches of one epoch, each of one or more parts of blocks."""

    def __init__(self, groups: list[RowGroup], order: Order, epoch: int) -> None:
        self.groups = groups
        self._order = order
        self._epoch = epoch
        self._lanes = self._deal()
        self._batch_lane, self._batch_place = _take_turns(
            [-(-int(lane.starts[-1]) // order.batch_size) for lane in self._lanes]
        )

    @property
    def num_batches(self) -> int:
        """Batches of all ranks together."""
        return len(self._batch_lane)

    @property
    def num_lanes(self) -> int:
        """Lanes in use."""
        return len(self._lanes)

    def batch(self, index: int) -> list[Part]:
        """Where the rows of batch `index` are, 0 <= index < num_batches."""
        lane = self._lanes[int(self._batch_lane[index])]
        first = int(self._batch_place[index]) * self._order.batch_size
        last = min(first + self._order.batch_size, int(lane.starts[-1]))
        parts = []
        place = int(np.searchsorted(lane.starts, first, side="right")) - 1
        while first < last:
            begin, end = int(lane.starts[place]), int(lane.starts[place + 1])
            parts.append(Part(lane.first_block + place, first - begin, min(last, end) - begin))
            first, place = min(last, end), place + 1
        return parts

    def block(self, number: int) -> Block:
        """The block that a part names."""
        lane = next(lane for lane in reversed(self._lanes) if lane.first_block <= number)
        members = lane.members[number - lane.first_block]
        if not self._order.shuffle:
            return Block(members, None)
        rows = sum(self.groups[member].num_rows for member in members)
        hashes = combine(self._order.seed, self._epoch, _ROWS, number, np.arange(rows))
        return Block(members, np.argsort(hashes, kind="stable"))

    def _deal(self) -> list["_Lane"]:
        """Row groups to lanes, and within each lane to blocks, in the order in which the lane reads them."""
        numbers = np.asarray([i for i, group in enumerate(self.groups) if group.num_rows], np.int64)
        if self._order.shuffle:
            order = np.argsort(combine(self._order.seed, self._epoch, _GROUPS, numbers), kind="stable")
            numbers = numbers[order]
        dealt: list[list[int]] = [[] for _ in range(self._lane_count(len(numbers)))]
        # The emptiest lane is next, so lanes of unequal row groups still end at nearly the same time.
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
        return self._order.shuffle_row_groups if self._order.shuffle else 1

    def _lane_count(self, num_groups: int) -> int:
        # A divisor of num_lanes, so that readers which divide num_lanes still meet whole lanes.
        if num_groups == 0:
            return 0
        most = max(1, num_groups // self._mixed)
        return max(
            n for n in range(1, self._order.num_lanes + 1) if self._order.num_lanes % n == 0 and n <= most
        )


class _Lane(NamedTuple):
    """A stream of blocks: the number of the first, the row groups of each, and the row of the lane it starts
    with."""

    first_block: int
    members: list[list[int]]
    starts: np.ndarray


def _take_turns(batches: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Lane, and place within the lane, of each batch: round after round over the lanes that have batches
    left."""
    lane = np.concatenate([np.full(n, i, np.int64) for i, n in enumerate(batches)] or [np.empty(0, np.int64)])
    place = np.concatenate([np.arange(n, dtype=np.int64) for n in batches] or [np.empty(0, np.int64)])
    order = np.lexsort((lane, place))
    return lane[order], place[order]


def resident_blocks(plan: EpochPlan, num_readers: int) -> int:
    """Blocks that one of `num_readers` readers, taking every num_readers-th batch, works on at a time."""
    lanes = plan.num_lanes // max(1, math.gcd(plan.num_lanes, num_readers))
    # One more: a batch on the border of two blocks needs both.
    return lanes + 1
