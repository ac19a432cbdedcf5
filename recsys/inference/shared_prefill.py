"""A ranker's scores of a block: neighbouring rows with the same user, request and history share a run of it.

Such rows become one row with all their candidates. Rows run through the model whole, long ones in pieces; or
a history runs once, and candidates are scored against what was kept of it, some at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.convert.column_block import ColumnBlock, FlatColumn
from recsys.inference.package import Package
from recsys.inference.rows import bounded_runs, cut_into_pieces, in_pieces, runs


@dataclass(frozen=True)
class Limits:
    """How much is scored at a time.

    Attributes:
        rows: of a call; users whose caches are held.
        piece: candidates of a row that run through the model with its whole history; whole target groups.
        total: candidates of a call on whole rows, unless a single row has more.
        cached_piece: candidates that are scored together against caches, padding included; whole target
            groups. None: rows run whole.
        group_size: candidates of a target group.
    """

    rows: int
    piece: int
    total: int
    cached_piece: int | None
    group_size: int


class RowScores:
    """Scores blocks with a package.

    Args:
        package: of a ranker.
        to_batch: makes a batch of rows.
        limits: see there.
    """

    def __init__(self, package: Package, to_batch: Callable[[ColumnBlock], Batch], limits: Limits):
        self.package, self.to_batch, self.limits = package, to_batch, limits

    def of(self, block: ColumnBlock) -> np.ndarray:
        """float32 [N, tasks], the scores of all candidates of a block, in its order."""
        merged = merge(block, self.limits.group_size)
        merged = merged.select(np.flatnonzero(merged.lengths[pb.CANDIDATE]))
        most = self.limits.cached_piece
        # Left on the device until all are computed: the next batch is put together meanwhile.
        found = list(self._whole_rows(merged) if most is None else self._with_cache(merged, most))
        if not found:
            return np.zeros((0, len(self.package.description.outputs)), np.float32)
        return torch.cat(found).cpu().numpy()

    def _whole_rows(self, block: ColumnBlock) -> Iterator[Tensor]:
        limits, pieces = self.limits, in_pieces(block, self.limits.piece)
        for rows in bounded_runs(pieces.lengths[pb.CANDIDATE].tolist(), limits.rows, limits.total):
            yield self.package.run(self.to_batch(pieces.select(rows)))

    def _with_cache(self, block: ColumnBlock, most: int) -> Iterator[Tensor]:
        package = self.package
        for rows in runs(len(block.row), self.limits.rows):
            part = block.select(rows)
            cache = package.prefill(self.to_batch(without(part, pb.CANDIDATE)))
            pieces, lengths = in_pieces(without(part, pb.HISTORY), most), part.lengths[pb.CANDIDATE]
            owner = cut_into_pieces(lengths, most).row.tolist()
            for run in packed(pieces.lengths[pb.CANDIDATE].tolist(), most):
                mine = owner[run]
                own = cache if mine == list(range(len(lengths))) else cache.select(mine)
                yield package.score(self.to_batch(pieces.select(run)), own)


def merge(block: ColumnBlock, group_size: int) -> ColumnBlock:
    """The rows of a block, runs of rows with the same user, request and history as one; candidates stay in
    their order.

    A row with a broken target group at its end has no other row behind it: groups would move.
    """
    lengths = block.lengths[pb.CANDIDATE]
    together = same_as_before(block)
    together[1:] &= lengths[:-1] % group_size == 0
    first = np.flatnonzero(~together)
    if len(first) == len(lengths):
        return block
    candidates = {name: column for name, column in block.flat.items() if column.side == pb.CANDIDATE}
    merged = without(block, pb.CANDIDATE).select(first)
    merged.lengths[pb.CANDIDATE] = np.add.reduceat(lengths, first)
    return replace(merged, flat={**merged.flat, **candidates})


def same_as_before(block: ColumnBlock) -> np.ndarray:
    """bool [rows]: whether a row has the user, request and history of the row before it."""
    count, lengths = len(block.row), block.lengths[pb.HISTORY]
    users = [column for column in block.flat.values() if column.side == pb.USER]
    events = [column for column in block.flat.values() if column.side == pb.HISTORY]
    same = np.arange(count) > 0
    for column in users:
        if column.offsets is None:
            same[1:] &= column.values[1:] == column.values[:-1]
    same[1:] &= lengths[1:] == lengths[:-1]
    for row in np.flatnonzero(same):
        same[row] = all(_repeats(column, row, row + 1, 1) for column in users if column.offsets is not None)
    # Long columns are compared last and as far as rows may be alike: in runs of such rows, mostly one a user.
    ends = np.cumsum(lengths)
    for first, stop in _runs_of_true(same):
        length = int(lengths[first])
        if _all_repeat(events, ends[first] - length, ends[stop - 1], length):
            continue
        for row in range(first, stop):
            same[row] = _all_repeat(events, ends[row] - length, ends[row], length)
    return same


def without(block: ColumnBlock, side: int) -> ColumnBlock:
    """The same rows with no events, or no candidates."""
    flat = {
        name: column if column.side != side else FlatColumn(side, column.values[:0], _nothing(column))
        for name, column in block.flat.items()
    }
    return replace(block, flat=flat, lengths={**block.lengths, side: np.zeros_like(block.lengths[side])})


def packed(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of pieces, as long as they fit into `most` candidates when padded to the longest of the run."""
    start, longest = 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place > start and (place - start + 1) * longest > most:
            yield slice(start, place)
            start, longest = place, length
    if start < len(lengths):
        yield slice(start, len(lengths))


def _runs_of_true(flags: np.ndarray) -> list[tuple[int, int]]:
    """First and behind the last place of each run."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(first), int(stop)) for first, stop in changes.reshape(-1, 2)]


def _all_repeat(columns: Sequence[FlatColumn], first: int, stop: int, length: int) -> bool:
    return all(_repeats(column, first, stop, length) for column in columns)


def _repeats(column: FlatColumn, first: int, stop: int, length: int) -> bool:
    """Whether elements `first` to `stop` - 1 are those that lie `length` places in front of them."""
    if length == 0:
        return True
    if column.offsets is None:
        return np.array_equal(column.values[first:stop], column.values[first - length : stop - length])
    offsets = column.offsets[first - length : stop + 1]
    counts, shift = np.diff(offsets), offsets[length] - offsets[0]
    return np.array_equal(counts[length:], counts[:-length]) and np.array_equal(
        column.values[offsets[length] : offsets[-1]], column.values[offsets[0] : offsets[-1] - shift]
    )


def _nothing(column: FlatColumn) -> np.ndarray | None:
    return None if column.offsets is None else column.offsets[:1]
