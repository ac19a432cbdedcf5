"""Loads batches of one split for one rank, from reader processes or in this process.

`Loader.open(pipeline, "train", rule).epoch(0)` is the way into the data path. `plan` decides the content of
batch k of an epoch, which depends on neither ranks nor readers; a loader only decides which rank and reader
make it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from recsys import protos as pb
from recsys.data.batch import Batch, LayoutRule, Position
from recsys.data.collator import Collator
from recsys.data.convert.packer import BatchArrays
from recsys.data.counts import RowCounter
from recsys.data.plan.duplicates import find_duplicates
from recsys.data.plan.epoch import PlanSettings
from recsys.data.plan.schedule import BatchSchedule, RepeatedSchedule, batches_of_rank
from recsys.data.schema.contract import Mode
from recsys.data.sources import Source, open_source
from recsys.data.unknown_ids import UnknownIds
from recsys.data.workers.pool import ReaderPool
from recsys.data.workers.reader import CheckedSource, Reader
from recsys.errors import DataError

_IN_USE = 4
"""Batches that training holds at a time: as many as a training pipeline has in flight, and one whose rows are
being exchanged."""


class Exchange(Protocol):
    """Replaces the rows that ranks have read for a step; `recsys.training.balance.RowExchange`.

    Attributes:
        waiting: makes the block in which `end` waits for other ranks.
    """

    waiting: Callable[[], AbstractContextManager]

    def begin(self, arrays: BatchArrays) -> None:
        """Starts to exchange the rows of this rank. All ranks call it for every batch, in the same order."""

    def end(self) -> BatchArrays:
        """Waits for the rows that this rank trains on and returns them."""
        raise NotImplementedError


class _Read(NamedTuple):
    """Arrays that were read, and the place of their batch in the data."""

    arrays: BatchArrays
    position: Position
    index: int


class Loader:
    """Loads the batches of one rank.

    Args:
        reader: makes the arrays of batches.
        collator: makes batches from these arrays.
        counter: counts rows that were left out or cut.
        unknown_ids: warns about vocabularies that do not fit the data.
        rank: number of this rank; decides which batches it loads.
        world_size: number of ranks.
        num_workers: number of reader processes; 0 reads in this process.
        prefetch: number of batches that each process may prepare ahead.
        keep_readers: whether the reader processes of `first` go on for its next call.

    Attributes:
        source: the source of the rows.
        batch_size: rows per batch; the last batches of an epoch may have fewer.
        counter: counts of this rank in the epoch so far.
        exchange: replaces the rows of each batch that this rank has read by those that it trains on; None
            keeps them.
    """

    def __init__(
        self,
        reader: Reader,
        collator: Collator,
        counter: RowCounter,
        unknown_ids: UnknownIds,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        prefetch: int = 1,
        keep_readers: bool = False,
    ) -> None:
        self.source = reader.source
        self.batch_size = reader.settings.batch_size
        self.counter = counter
        self.exchange: Exchange | None = None
        self._reader = reader
        self._collator = collator
        self._unknown_ids = unknown_ids
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._keep_readers = keep_readers
        self._kept: Generator[BatchArrays] | None = None
        self._kept_indices = range(0)

    @classmethod
    def open(
        cls,
        pipeline: pb.Pipeline,
        split: str | pb.Source,
        rule: LayoutRule,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        mode: Mode | None = None,
        keep_readers: bool = False,
    ) -> "Loader":
        """Opens the source and checks every file's schema.

        Args:
            pipeline: resolved.
            split: "train", "validation", "test", or another source.
            rule: how rows become sequences; see `models.layout_rule`.
            rank: number of this rank; decides which batches it loads.
            world_size: number of ranks.
            shuffle: whether to mix rows, differently in each epoch.
            mode: purpose of the rows; by default "train" for the split "train", else "evaluate". "predict"
                reads no labels, cuts no candidates, and keeps the order of the files.
            keep_readers: whether the reader processes of `first` go on for its next call, until `close`.

        Raises:
            DataError: files are missing, broken, without rows, or do not fit the config; or rows repeat the
                key and request time of others and `data.bad_rows` does not leave them out.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, world_size {world_size}; ranks are 0 to world_size - 1")
        data = pipeline.data
        mode = mode or ("train" if split == "train" else "evaluate")
        source = _open(pipeline, split, may_be_empty=mode == "predict")
        # Checked before rows are compared: if a key column were missing, different rows would look the same.
        columns = source.check(pipeline, mode)
        name = split if isinstance(split, str) else "predicted"
        rank_name = f", rank {rank}" if world_size > 1 else ""
        counter = RowCounter(name, rank_name, by_epoch=mode == "train")
        collator = Collator.open(pipeline, rule, mode, rank, world_size)
        settings = PlanSettings(
            batch_size=data.batch_size if mode == "train" else data.eval_batch_size,
            num_lanes=1 if mode == "predict" else data.num_lanes,
            shuffle_row_groups=data.shuffle_row_groups,
            seed=pipeline.train.seed,
            shuffle=shuffle,
        )
        reader = Reader(
            pipeline,
            CheckedSource(source, columns, find_duplicates(source, pipeline)),
            settings,
            mode,
            rule=rule,
            num_readers=world_size * max(1, data.num_workers),
            # Slots for the batches that wait, the one that is being filled, and those in use.
            num_slots=data.prefetch_batches + 1 + _IN_USE,
        )
        return cls(
            reader,
            collator,
            counter,
            UnknownIds(pipeline),
            rank=rank,
            world_size=world_size,
            num_workers=data.num_workers,
            prefetch=data.prefetch_batches,
            keep_readers=keep_readers,
        )

    def num_batches(self, epoch: int = 0) -> int:
        """Returns the number of batches in an epoch, over all ranks."""
        return self._reader.plan(epoch).num_batches

    def num_steps(self, epoch: int = 0, start: int = 0) -> int:
        """Returns the number of batches that `epoch` yields, which is the same on every rank."""
        return -(-max(0, self.num_batches(epoch) - start) // self._world_size)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yields this rank's batches of an epoch, starting at batch `start` of the plan.

        All ranks yield the same number of batches: a rank that runs out of rows yields filler batches, whose
        rows have weight 0.

        `position.index` is the last batch of the plan that any rank holds in this step, so
        `start = position.index + 1` continues after it.

        Raises:
            DataError: a row or file is bad.
            RecsysError: a reader process died.
        """
        with closing(self._stream([(epoch, index) for index in self._indices(epoch, start)])) as stream:
            yield from self._batches(epoch, start, stream)

    def first(self, limit: int | None = None) -> Iterator[Batch]:
        """Yields this rank's first `limit` batches of epoch 0, all if it is None; the same on every call.

        With `keep_readers`, the readers prepare the batches of the next call while the caller does something
        else, so that evaluations during training need not wait for them.

        Raises the errors of `epoch`.
        """
        indices = self._indices(0, 0)[:limit]
        if not (self._keep_readers and self._num_workers and indices):
            yield from islice(self.epoch(0), limit)
            return
        if self._kept is None or self._kept_indices != indices:
            self.close()
            self._kept, self._kept_indices = self._stream(RepeatedSchedule(indices)), indices
        is_complete = False
        try:
            yield from self._batches(0, 0, self._kept, limit)
            is_complete = True
        finally:
            if not is_complete:
                self.close()

    def close(self) -> None:
        """Ends the reader processes that wait for the next call of `first`."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def epochs(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yields the batches of epoch `epoch` and of all epochs after it, without end.

        Readers begin the next epoch while the last batches of this one still wait to be taken.

        Raises the errors of `epoch`.
        """
        number = epoch
        while True:
            schedule = BatchSchedule(self._reader.plan, number, start, self._rank, self._world_size)
            with closing(self._stream(schedule)) as stream:
                is_empty = False
                # The schedule ends at an epoch that has no batch for this rank; a new stream begins after it.
                while not is_empty:
                    is_empty = not self._indices(number, start)
                    yield from self._batches(number, start, stream)
                    number, start = number + 1, 0

    def collate(self, arrays: BatchArrays) -> Batch:
        """Makes a batch, at no position in the data, of any rows."""
        return self._collator.collate(arrays, Position(), 0)

    def filler(self, num_rows: int) -> BatchArrays:
        """Makes filler rows, which have weight 0 and neither events nor candidates."""
        return self._reader.filler(num_rows)

    def _indices(self, epoch: int, start: int) -> range:
        return batches_of_rank(self._reader.plan(epoch), start, self._rank, self._world_size)

    def _batches(
        self, epoch: int, start: int, stream: Iterator[BatchArrays], limit: int | None = None
    ) -> Iterator[Batch]:
        self.counter.begin()
        batches = self._read(epoch, start, stream, limit)
        if self.exchange is not None:
            batches = _exchanged(batches, self.exchange)
        try:
            with closing(batches):
                for arrays, position, index in batches:
                    yield self._collator.collate(arrays, position, index)
        finally:
            self.counter.log(epoch)

    def _read(
        self, epoch: int, start: int, stream: Iterator[BatchArrays], limit: int | None
    ) -> Generator[_Read]:
        num_batches = self.num_batches(epoch)
        for step in range(self.num_steps(epoch, start))[:limit]:
            first = start + step * self._world_size
            position = Position(epoch, min(first + self._world_size, num_batches) - 1)
            index = first + self._rank
            arrays = self._count(next(stream)) if index < num_batches else self.filler(self.batch_size)
            yield _Read(arrays, position, index)

    def _count(self, arrays: BatchArrays) -> BatchArrays:
        self.counter.add(np.count_nonzero(arrays.row >= 0), arrays.counts)
        if self._rank == 0:
            self._unknown_ids.observe(arrays)
        return arrays

    def _stream(
        self, schedule: list[tuple[int, int]] | BatchSchedule | RepeatedSchedule
    ) -> Generator[BatchArrays]:
        num_workers = self._num_workers
        if not isinstance(schedule, BatchSchedule):
            listed = schedule.indices if isinstance(schedule, RepeatedSchedule) else schedule
            num_workers = min(num_workers, len(listed))
        if num_workers == 0:
            yield from self._read_here(schedule)
            return
        pool = ReaderPool(self._reader, schedule, num_workers, ahead=self._prefetch)
        try:
            yield from pool
        finally:
            # The caller may stop in the middle.
            pool.close()

    def _read_here(self, schedule: Iterable[tuple[int, int]]) -> Iterator[BatchArrays]:
        for number, (epoch, index) in enumerate(schedule):
            if number == 0:
                self._reader.begin(epoch)
            yield self._reader.read(epoch, index)


def _exchanged(batches: Iterator[_Read], exchange: Exchange) -> Generator[_Read]:
    """Yields batches with the rows that this rank trains on, while those of the next one are exchanged."""
    begun = next(batches, None)
    if begun is None:
        return
    exchange.begin(begun.arrays)
    for following in batches:
        exchanged, begun = begun._replace(arrays=exchange.end()), following
        exchange.begin(following.arrays)
        try:
            yield exchanged
        except GeneratorExit:
            # Every rank has begun it.
            exchange.end()
            raise
    yield begun._replace(arrays=exchange.end())


def _open(pipeline: pb.Pipeline, split: str | pb.Source, *, may_be_empty: bool) -> Source:
    if isinstance(split, str) and not pipeline.data.HasField(split):
        raise DataError(
            f"data.{split} is not set. Give it a source, e.g. {split} {{ parquet {{ paths: 'FILE' }} }}."
        )
    source = open_source(getattr(pipeline.data, split) if isinstance(split, str) else split, pipeline)
    if source.num_rows == 0 and not may_be_empty:
        raise DataError(f"{', '.join(file.path for file in source.files) or split}: there are no rows.")
    return source
