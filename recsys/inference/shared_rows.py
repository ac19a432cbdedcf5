"""Scores the rows of a block, encoding a history once for consecutive rows that share it.

Consecutive rows with the same user, request and history become one row with all their candidates before
batches are made, so that the history is packed and encoded once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.convert.column_block import ColumnBlock, FlatColumn
from recsys.inference.package import Package
from recsys.inference.rows import bounded_runs, in_pieces
from recsys.scoring.cache import UserCache
from recsys.scoring.cached_signature import CacheSpec
from recsys.scoring.scorer import Scorer


class PackageProgram:
    """The programs of a package, as the `Program` of a `Scorer`."""

    def __init__(self, package: Package):
        self.package = package

    @property
    def device(self) -> torch.device:
        """The device for which the package was compiled."""
        return torch.device(self.package.description.device)

    @property
    def keeps_cache(self) -> bool:
        """Whether the package was exported with the programs that score with a cache."""
        return self.package.cached is not None

    @property
    def folder(self) -> Path:
        """The folder of the package, whose manifest identifies the weights."""
        return self.package.folder

    @property
    def cache_spec(self) -> CacheSpec | None:
        """Describes the tensors of a cache; None without these programs."""
        return None if self.package.cached is None else self.package.cached.cache_spec

    def run(self, batch: Batch) -> Tensor:
        """Scores a batch in one pass."""
        return self.package.run(batch)

    def prefill(self, batch: Batch) -> UserCache:
        """Encodes users and histories."""
        return self.package.prefill(batch)

    @property
    def extends(self) -> bool:
        """Whether the package was exported with the program that extends a cache."""
        return self.package.cached is not None and self.package.cached.extends

    def extend(self, batch: Batch, cache: UserCache) -> UserCache:
        """Returns the cache of the users with the events of a batch appended; see `CachedPrograms.extend`."""
        return self.package.extend(batch, cache)

    def score(self, batch: Batch, cache: UserCache) -> Tensor:
        """Scores candidates of the users of a cache."""
        return self.package.score(batch, cache)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the scores of consecutive candidates."""
        return torch.cat(list(parts))


@dataclass(frozen=True)
class Limits:
    """The bounds of a batch.

    Attributes:
        rows: the most rows of a batch.
        candidates: the most candidates of a batch, unless a single row has more.
        longest: the most candidates of a row that is scored in one pass; longer rows are cut and repeat their
            history.
        group_size: number of consecutive candidates that can only be scored together.
    """

    rows: int
    candidates: int
    longest: int
    group_size: int


class BlockScores:
    """Scores the candidates of blocks.

    Args:
        scorer: chooses how each batch is scored.
        to_batch: makes a batch from rows.
        limits: bounds of a batch.
        num_outputs: number of tasks.
        score: scores the rows of a batch; by default, without a store of users.
    """

    def __init__(
        self,
        scorer: Scorer[Tensor],
        to_batch: Callable[[ColumnBlock], Batch],
        limits: Limits,
        num_outputs: int,
        score: Callable[[ColumnBlock], Tensor] | None = None,
    ):
        self.scorer, self.limits, self.num_outputs = scorer, limits, num_outputs
        self.score = score or (lambda rows: scorer.score(to_batch(rows)))

    def of(self, block: ColumnBlock) -> np.ndarray:
        """Returns the scores of all candidates of a block in its order, float32 [N, tasks]."""
        merged = merge(block, self.limits.group_size)
        has_candidates = merged.lengths[pb.CANDIDATE] > 0
        if not has_candidates.all():
            merged = merged.select(np.flatnonzero(has_candidates))
        # Scores stay on the device until all are computed, so that the next batch is prepared meanwhile.
        scores = list(self._scores(merged))
        if not scores:
            return np.zeros((0, self.num_outputs), np.float32)
        return torch.cat(scores).cpu().numpy()

    def _scores(self, block: ColumnBlock) -> Iterator[Tensor]:
        limits = self.limits
        rows = block if self.scorer.may_cache else in_pieces(block, limits.longest)
        for run in bounded_runs(rows.lengths[pb.CANDIDATE].tolist(), limits.rows, limits.candidates):
            is_all = run.stop - run.start == len(rows.row)
            yield self.score(rows if is_all else rows.select(run))


def merge(block: ColumnBlock, group_size: int) -> ColumnBlock:
    """Merges consecutive rows with the same user, request and history; candidates keep their order.

    A row whose last target group is incomplete is not merged with the next row, because groups would shift.
    """
    lengths = block.lengths[pb.CANDIDATE]
    if len(lengths) < 2:
        return block
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
    """Returns whether each row has the same user, request and history as the previous row, bool [rows]."""
    count, lengths = len(block.row), block.lengths[pb.HISTORY]
    users = [column for column in block.flat.values() if column.side == pb.USER]
    events = [column for column in block.flat.values() if column.side == pb.HISTORY]
    repeats = np.arange(count) > 0
    for column in users:
        if column.offsets is None:
            same = column.values[1:] == column.values[:-1]
            repeats[1:] &= same if same.ndim == 1 else same.all(axis=1)
    repeats[1:] &= lengths[1:] == lengths[:-1]
    for row in np.flatnonzero(repeats):
        repeats[row] = all(
            _repeats(column, row, row + 1, 1) for column in users if column.offsets is not None
        )
    # Compare long columns last, and only within runs of rows that are equal so far, mostly one run per user.
    ends = np.cumsum(lengths)
    for first, stop in _runs_of_true(repeats):
        length = int(lengths[first])
        if _all_repeat(events, ends[first] - length, ends[stop - 1], length):
            continue
        for row in range(first, stop):
            repeats[row] = _all_repeat(events, ends[row] - length, ends[row], length)
    return repeats


def without(block: ColumnBlock, side: int) -> ColumnBlock:
    """Returns the same rows without the entries of `side`: without events, or without candidates."""
    flat = {
        name: column if column.side != side else FlatColumn(side, column.values[:0], _nothing(column))
        for name, column in block.flat.items()
    }
    return replace(block, flat=flat, lengths={**block.lengths, side: np.zeros_like(block.lengths[side])})


def _runs_of_true(flags: np.ndarray) -> list[tuple[int, int]]:
    """Returns, for each run of true flags, its first index and the index after its last."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(first), int(stop)) for first, stop in changes.reshape(-1, 2)]


def _all_repeat(columns: Sequence[FlatColumn], first: int, stop: int, length: int) -> bool:
    return all(_repeats(column, first, stop, length) for column in columns)


def _repeats(column: FlatColumn, first: int, stop: int, length: int) -> bool:
    """Returns whether elements `first` to `stop` - 1 equal the elements `length` positions before them."""
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
