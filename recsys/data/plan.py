"""The order of an epoch: which rows make up batch k, as a pure function of (seed, epoch, row groups, three
settings).

Neither ranks nor reader processes occur in it, so a run that is resumed with other numbers of them goes on
with the same batches. Row groups are dealt to lanes; the rows of a few row groups of a lane are mixed; lanes
take turns. A reader that serves one lane out of n therefore touches one row group out of n, and decodes each
of them once.
"""

import heapq
from collections import OrderedDict
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


class BatchRows(NamedTuple):
    """The rows of one batch, in file order: int64 [B] number of the row group in the list, int64 [B] row
    within it."""

    group: np.ndarray
    row: np.ndarray


class EpochPlan:
    """Batches of one epoch."""

    def __init__(self, groups: list[RowGroup], order: Order, epoch: int) -> None:
        self.groups = groups
        self._order = order
        self._epoch = epoch
        self._lanes = [_Lane(members, groups, self._mixed) for members in self._deal()]
        self._lane, self._place = _take_turns([-(-lane.num_rows // order.batch_size) for lane in self._lanes])
        self._shuffled: OrderedDict[tuple[int, int], BatchRows] = OrderedDict()

    @property
    def num_batches(self) -> int:
        """Batches of all ranks together."""
        return len(self._lane)

    @property
    def num_lanes(self) -> int:
        """Lanes in use."""
        return len(self._lanes)

    def batch(self, index: int) -> BatchRows:
        """The rows of batch `index`, 0 <= index < num_batches."""
        lane = int(self._lane[index])
        first = int(self._place[index]) * self._order.batch_size
        last = min(first + self._order.batch_size, self._lanes[lane].num_rows)
        parts = []
        starts = self._lanes[lane].block_starts
        block = int(np.searchsorted(starts, first, side="right")) - 1
        while first < last:
            stop = min(last, int(starts[block + 1]))
            rows = self._block(lane, block)
            cut = slice(first - int(starts[block]), stop - int(starts[block]))
            parts.append(BatchRows(rows.group[cut], rows.row[cut]))
            first, block = stop, block + 1
        group = np.concatenate([part.group for part in parts])
        row = np.concatenate([part.row for part in parts])
        in_order = np.lexsort((row, group))
        return BatchRows(group[in_order], row[in_order])

    @property
    def _mixed(self) -> int:
        return self._order.shuffle_row_groups if self._order.shuffle else 1

    def _deal(self) -> list[list[int]]:
        """Row groups of each lane, in the order in which the lane reads them."""
        numbers = np.asarray([i for i, group in enumerate(self.groups) if group.num_rows], np.int64)
        if self._order.shuffle:
            numbers = numbers[
                np.argsort(combine(self._order.seed, self._epoch, _GROUPS, numbers), kind="stable")
            ]
        lanes: list[list[int]] = [[] for _ in range(self._lane_count(len(numbers)))]
        # The emptiest lane is next, so lanes of unequal row groups still end at nearly the same time.
        filled = [(0, lane) for lane in range(len(lanes))]
        for number in numbers.tolist():
            rows, lane = heapq.heappop(filled)
            lanes[lane].append(number)
            heapq.heappush(filled, (rows + self.groups[number].num_rows, lane))
        return lanes

    def _lane_count(self, num_groups: int) -> int:
        # A divisor of num_lanes, so that readers which divide num_lanes still meet whole lanes.
        if num_groups == 0:
            return 0
        most = max(1, num_groups // self._mixed)
        return max(
            n for n in range(1, self._order.num_lanes + 1) if self._order.num_lanes % n == 0 and n <= most
        )

    def _block(self, lane: int, block: int) -> BatchRows:
        key = (lane, block)
        if key not in self._shuffled:
            self._shuffled[key] = self._shuffle(self._lanes[lane].members(block), key)
            while len(self._shuffled) > 2 * len(self._lanes):
                self._shuffled.popitem(last=False)
        self._shuffled.move_to_end(key)
        return self._shuffled[key]

    def _shuffle(self, members: list[int], key: tuple[int, int]) -> BatchRows:
        sizes = np.asarray([self.groups[member].num_rows for member in members])
        group = np.repeat(np.asarray(members, np.int64), sizes)
        row = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
        if self._order.shuffle:
            hashes = combine(self._order.seed, self._epoch, _ROWS, *key, np.arange(len(row)))
            order = np.argsort(hashes, kind="stable")
            group, row = group[order], row[order]
        return BatchRows(group, row)


class _Lane:
    """The row groups of a lane, cut into blocks of `mixed` row groups whose rows are mixed."""

    def __init__(self, order: list[int], groups: list[RowGroup], mixed: int) -> None:
        self._groups = order
        self._mixed = mixed
        sizes = [
            sum(groups[i].num_rows for i in order[at : at + mixed]) for at in range(0, len(order), mixed)
        ]
        self.block_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.num_rows = int(self.block_starts[-1])

    def members(self, block: int) -> list[int]:
        return self._groups[block * self._mixed : (block + 1) * self._mixed]


def _take_turns(batches: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Lane, and place within the lane, of each batch: round after round over the lanes that have batches
    left."""
    lane = np.concatenate([np.full(n, i, np.int64) for i, n in enumerate(batches)] or [np.empty(0, np.int64)])
    place = np.concatenate([np.arange(n, dtype=np.int64) for n in batches] or [np.empty(0, np.int64)])
    order = np.lexsort((lane, place))
    return lane[order], place[order]


def resident_row_groups(plan: EpochPlan, order: Order, num_readers: int) -> int:
    """Row groups that one of `num_readers` readers, taking every num_readers-th batch, works on at a time."""
    lanes = plan.num_lanes // max(1, int(np.gcd(plan.num_lanes, num_readers)))
    mixed = order.shuffle_row_groups if order.shuffle else 1
    # One lane more: a batch on the border of two blocks needs both.
    return max(1, (lanes + 1) * mixed)
