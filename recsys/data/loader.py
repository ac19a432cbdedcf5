"""Batches of one split for one rank, from reader processes or from this one.

The way into the data path: `Loader(pipeline, "train", rule).epoch(0)`. What is in batch k of an epoch is
decided in `plan` and depends on neither ranks nor readers; a loader only decides who makes it.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

from recsys import protos as pb
from recsys.data.batch import Batch, LayoutRule, Position
from recsys.data.collator import Collator
from recsys.data.convert.unknown_ids import UnknownIds
from recsys.data.counts import Account
from recsys.data.plan.duplicates import find_duplicates
from recsys.data.plan.epoch import Order
from recsys.data.plan.schedule import Places, indices
from recsys.data.schema.contract import Mode
from recsys.data.sources import Source, open_source
from recsys.data.workers.packer import Arrays
from recsys.data.workers.pool import ReaderPool
from recsys.data.workers.reader import Reader
from recsys.errors import DataError

_IN_USE = 3
"""Batches that training works on at a time: a pipeline holds as many."""


class Loader:
    """Reads one split.

    Attributes:
        source: its files.
        batch_size: rows of a batch; the last ones of an epoch may have fewer.
        account: rows of this rank that were left out or cut in the epoch so far.
    """

    def __init__(
        self,
        pipeline: pb.Pipeline,
        split: str | pb.Source,
        rule: LayoutRule,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        mode: Mode | None = None,
    ) -> None:
        """Opens the source and checks every file's schema.

        Args:
            pipeline: resolved.
            split: "train", "validation", "test", or a source of its own.
            rule: how rows become sequences; `models.layout_rule`.
            rank: which of the world's batches are this loader's.
            world_size: number of ranks.
            shuffle: mix rows, differently in each epoch.
            mode: what rows are read for; by default "train" for the split "train", else "evaluate". "predict"
                wants no labels, cuts no candidates, and gives the rows in the order of the files.

        Raises:
            DataError: files that are missing, broken, without rows, or that do not fit the config; rows that
                repeat the key and request time of others, unless `data.bad_rows` leaves them out.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, world_size {world_size}; ranks are 0 to world_size - 1")
        data = pipeline.data
        mode = mode or ("train" if split == "train" else "evaluate")
        self.source = _open(pipeline, split, may_be_empty=mode == "predict")
        # Before rows are compared: without one of these columns other rows than meant would be the same.
        self.source.check(pipeline, mode)
        self.batch_size = data.batch_size if mode == "train" else data.eval_batch_size
        name = split if isinstance(split, str) else "predicted"
        rank_name = f", rank {rank}" if world_size > 1 else ""
        self.account = Account(name, rank_name, by_epoch=mode == "train")
        self._rank = rank
        self._world_size = world_size
        self._num_workers = data.num_workers
        self._prefetch = data.prefetch_batches
        self._collator = Collator(pipeline, rule, mode)
        self._unknown_ids = UnknownIds(pipeline)
        self._reader = Reader(
            pipeline,
            self.source,
            Order(
                batch_size=self.batch_size,
                num_lanes=1 if mode == "predict" else data.num_lanes,
                shuffle_row_groups=data.shuffle_row_groups,
                seed=pipeline.train.seed,
                shuffle=shuffle,
            ),
            mode,
            rule=rule,
            num_readers=world_size * max(1, data.num_workers),
            # One is being filled and some are in use beside those that wait.
            num_slots=data.prefetch_batches + 1 + _IN_USE,
            duplicates=find_duplicates(self.source, pipeline),
        )

    def num_batches(self, epoch: int = 0) -> int:
        """Batches of all ranks together in an epoch."""
        return self._reader.plan(epoch).num_batches

    def num_steps(self, epoch: int = 0, start: int = 0) -> int:
        """Batches that `epoch` yields, on every rank the same number."""
        return -(-max(0, self.num_batches(epoch) - start) // self._world_size)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, from batch `start` of the plan on.

        All ranks yield equally many: one that has run out yields filler batches (weight 0). `position.index`
        is the last batch of the plan that any rank holds in this step, so `start = position.index + 1` goes
        on behind it.

        Raises:
            DataError: a bad row or file.
            RecsysError: a reader process died.
        """
        with closing(self._stream([(epoch, index) for index in self._indices(epoch, start)])) as stream:
            yield from self._batches(epoch, start, stream)

    def epochs(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The same for this epoch and all that follow, without end: readers begin the next epoch while the
        last batches of this one are still waiting.

        Raises: as `epoch`.
        """
        number = epoch
        while True:
            rank = (self._rank, self._world_size)
            with closing(self._stream(Places(self._reader, number, start, *rank))) as stream:
                nothing = False
                # The places end at an epoch that has nothing for this rank; a new stream begins behind it.
                while not nothing:
                    nothing = not self._indices(number, start)
                    yield from self._batches(number, start, stream)
                    number, start = number + 1, 0

    def _indices(self, epoch: int, start: int) -> range:
        return indices(self._reader, epoch, start + self._rank, self._world_size)

    def _batches(self, epoch: int, start: int, stream: Iterator[Arrays]) -> Iterator[Batch]:
        self.account.begin()
        num_batches = self.num_batches(epoch)
        try:
            for step in range(self.num_steps(epoch, start)):
                first = start + step * self._world_size
                position = Position(epoch, min(first + self._world_size, num_batches) - 1)
                index = first + self._rank
                arrays = self._count(next(stream)) if index < num_batches else self._reader.filler()
                yield self._collator.collate(arrays, position, index)
        finally:
            self.account.say(epoch)

    def _count(self, arrays: Arrays) -> Arrays:
        self.account.add(int((arrays.row >= 0).sum()), arrays.counts)
        if self._rank == 0:
            self._unknown_ids.look(arrays)
        return arrays

    def _stream(self, places: list[tuple[int, int]] | Places) -> Generator[Arrays]:
        most = self._num_workers if isinstance(places, Places) else len(places)
        num_workers = min(self._num_workers, most)
        if num_workers == 0:
            yield from self._here(places)
            return
        pool = ReaderPool(self._reader, places, num_workers, ahead=self._prefetch)
        try:
            yield from pool
        finally:
            # Also when the caller stops in the middle.
            pool.close()

    def _here(self, places: Iterable[tuple[int, int]]) -> Iterator[Arrays]:
        for number, place in enumerate(places):
            if number == 0:
                self._reader.begin(place[0])
            yield self._reader.read(*place)


def _open(pipeline: pb.Pipeline, split: str | pb.Source, *, may_be_empty: bool) -> Source:
    if isinstance(split, str) and not pipeline.data.HasField(split):
        raise DataError(
            f"data.{split} is not set. Give it a source, e.g. {split} {{ parquet {{ paths: 'FILE' }} }}."
        )
    source = open_source(getattr(pipeline.data, split) if isinstance(split, str) else split, pipeline)
    if source.num_rows == 0 and not may_be_empty:
        raise DataError(f"{', '.join(file.path for file in source.files) or split}: there are no rows.")
    return source
