"""Does the work of a reader process: from the plan to row groups, blocks and the arrays of a batch.

Known errors are returned as values, so that the user sees the error and not a traceback of another process.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.data.convert.column_block import ColumnBlock, join
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.packer import BatchArrays, Packed, Packer, allocate_bytes
from recsys.data.convert.row_checks import REASONS
from recsys.data.lru import Lru
from recsys.data.plan.duplicates import Duplicates
from recsys.data.plan.epoch import BlockSlice, EpochPlan, PlanSettings, resident_blocks
from recsys.data.schema.contract import Mode
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.sources import RowGroup, Source
from recsys.data.workers import memory
from recsys.data.workers.slots import ReservedSlot, SlotWriter
from recsys.errors import DataError, RecsysError

_SMALL = 2**22
"""Bytes in shared memory up to which a reader process prepares more batches ahead than asked. Otherwise a
small model waits for each block of row groups, which a reader converts all at once."""


class CheckedSource(NamedTuple):
    """A source whose files fit the config.

    Attributes:
        source: the rows.
        columns: names of the columns to read, as `Source.check` returns them.
        duplicates: the repeated rows; None searches for repeated rows within each row group.
    """

    source: Source
    columns: list[str]
    duplicates: Duplicates | None = None


class Reader:
    """Makes the arrays of any batch of any epoch, in any order.

    Args:
        pipeline: resolved.
        rows: the source.
        settings: settings that decide the order of rows.
        mode: purpose of the rows.
        rule: how rows become sequences.
        num_readers: number of readers, over all ranks, that share an epoch; decides how many row groups stay
            in memory.
        num_slots: most batches of a reader process that may be in shared memory at a time.
    """

    def __init__(
        self,
        pipeline: pb.Pipeline,
        rows: CheckedSource,
        settings: PlanSettings,
        mode: Mode,
        *,
        rule: LayoutRule,
        num_readers: int,
        num_slots: int,
    ) -> None:
        self.source = rows.source
        self.settings = settings
        self._pipeline = pipeline
        self._rows = rows
        self._mode: Mode = mode
        self._rule = rule
        self._num_readers = num_readers
        self._num_slots = num_slots
        self._forget()

    def __getstate__(self) -> dict:
        # Blocks and vocabularies may be large, so the receiving process makes its own.
        state = dict(self.__dict__)
        for name in ("_converter", "_packer", "_plan", "_plans", "_blocks", "_slots"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._packer = Packer(self._pipeline, self._rule, self._mode)
        self._converter: Converter | None = None
        self._slots: SlotWriter | None = None
        self._plan: EpochPlan | None = None
        # A step asks for the current epoch's number of batches; a plan may list thousands of row groups.
        self._plans: Lru[EpochPlan] = Lru(2)
        self._epoch = self._last = -1

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> Packed | RecsysError:
        """Returns batch (epoch, index), ready to be sent, or the error that prevented it."""
        if self._slots is None:
            # This is the first batch of this process.
            memory.keep_freed_memory()
            self._slots = SlotWriter(self._num_slots, _SMALL)
        try:
            return self._pack_into_slot(*epoch_and_index, self._slots)
        except RecsysError as error:
            return error

    @property
    def more_ahead(self) -> int:
        """Number of batches, beyond those asked, that this process may prepare ahead; they are small."""
        return 0 if self._slots is None else self._slots.num_more

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch."""
        return self._plans.get(epoch, lambda: EpochPlan(self.source.row_groups, self.settings, epoch))

    def begin(self, epoch: int) -> None:
        """Starts an epoch: resets counts and drops cached blocks.

        `read` calls it when the epoch changes or begins again.
        """
        self._plan = self.plan(epoch)
        self._epoch = epoch
        self._skipped: Counter[str] = Counter()
        self._blocks: Lru[ColumnBlock] = Lru(resident_blocks(self._plan, self._num_readers))

    def filler(self, num_rows: int) -> BatchArrays:
        """Makes a batch of filler rows."""
        return self._packer.filler(num_rows)

    def read(self, epoch: int, index: int) -> BatchArrays:
        """Makes the arrays of batch `index` of an epoch's plan, in new memory.

        Raises:
            DataError: a row or file is bad.
        """
        return self._pack(epoch, index, allocate_bytes).arrays()

    def _pack_into_slot(self, epoch: int, index: int, slots: SlotWriter) -> Packed:
        """Makes a batch in shared memory if a slot is free, else in memory that travels through the pipe."""
        reserved: list[ReservedSlot] = []

        def allocate(num_bytes: int) -> np.ndarray:
            slot = slots.reserve(num_bytes)
            if slot is None:
                return allocate_bytes(num_bytes)
            reserved.append(slot)
            return slot.memory

        packed = self._pack(epoch, index, allocate)
        return packed._replace(buffer=reserved[0].slot) if reserved else packed

    def _pack(self, epoch: int, index: int, allocate: Callable[[int], np.ndarray]) -> Packed:
        if self._converter is None:
            self._converter = Converter.open(self._pipeline, self._rule, mode=self._mode)
        if epoch != self._epoch or index <= self._last:
            self.begin(epoch)
        self._last = index
        blocks = [self._slice(rows) for rows in self._plan.batch(index)]
        packed = self._packer.packed(blocks[0] if len(blocks) == 1 else join(blocks), allocate)
        self._count(packed.plain_fields["counts"])
        return packed

    def _slice(self, rows: BlockSlice) -> ColumnBlock:
        block = self._blocks.get(rows.block, lambda: self._mix(rows.block))
        return block.select(slice(rows.start, rows.stop))

    def _mix(self, number: int) -> ColumnBlock:
        """Mixes the rows of a block's row groups once, so that each batch is a slice of the block."""
        members, order = self._plan.block(number)
        return join([self._convert(self._plan.groups[member]) for member in members], order)

    def _convert(self, group: RowGroup) -> ColumnBlock:
        table = self.source.read(group.file, group.number, self._rows.columns)
        path = self.source.files[group.file].path
        origin = Origin(group.file, group.first_row, path, self._epoch)
        return self._converter.block(table, origin, self._rows.duplicates)

    def _count(self, counts: Counter[str]) -> None:
        self._skipped.update({reason: counts[reason] for reason in REASONS if counts[reason]})
        limit = self._pipeline.data.bad_rows.limit
        if self._skipped.total() > limit:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._skipped.most_common())
            raise DataError(
                f"{self._skipped.total()} rows were left out ({reasons}), more than "
                f"data.bad_rows.limit = {limit}. Correct the files, or raise the limit."
            )
