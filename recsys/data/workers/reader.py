"""What runs in a reader process: plan -> row groups -> blocks -> arrays of a batch.

A known error is handed back as a value, so that the user sees it
and not the traceback of a process that they did not know of.
"""

from collections import Counter

from recsys import protos as pb
from recsys.data.convert.block import Block, join
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.row_checks import REASONS
from recsys.data.lru import Lru
from recsys.data.plan.duplicates import Duplicates
from recsys.data.plan.epoch import EpochPlan, Order, Part, RowGroup, resident_blocks
from recsys.data.schema.contract import Mode
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.sources import Source
from recsys.data.workers import memory
from recsys.data.workers.packer import Arrays, Packed, Packer
from recsys.data.workers.slots import SlotWriter
from recsys.errors import DataError, RecsysError


class Reader:
    """Arrays of batch `index` of an epoch, for any (epoch, index) in any order."""

    def __init__(
        self,
        pipeline: pb.Pipeline,
        source: Source,
        order: Order,
        mode: Mode,
        *,
        rule: LayoutRule,
        num_readers: int,
        num_slots: int,
        duplicates: Duplicates | None = None,
    ) -> None:
        """Checks the schema of every file; opens nothing yet.

        Args:
            pipeline: resolved.
            order: of the rows.
            rule: how rows become sequences.
            num_readers: readers of all ranks that share an epoch; decides how many row groups are kept in
                memory.
            num_slots: batches that a reader process may have sent and that are still in use.
            duplicates: of the source; None looks for them within each row group.

        Raises:
            DataError: a file that does not fit.
        """
        self.order = order
        self._pipeline = pipeline
        self._source = source
        self._mode: Mode = mode
        self._rule = rule
        self._num_readers = num_readers
        self._num_slots = num_slots
        self._duplicates = duplicates
        self._columns = source.check(pipeline, mode)
        self._forget()

    def __getstate__(self) -> dict:
        # Blocks and vocabularies may be large; the other process makes its own.
        state = dict(self.__dict__)
        for name in ("_converter", "_packer", "_plan", "_blocks", "_slots"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._converter: Converter | None = None
        self._slots: SlotWriter | None = None
        self._plan: EpochPlan | None = None
        self._epoch = -1

    def __getitem__(self, place: tuple[int, int]) -> Packed | RecsysError:
        """The batch at (epoch, index), ready to be sent, or the error that kept it from being made."""
        if self._slots is None:
            # The first batch that this process is asked for.
            memory.keep()
            self._slots = SlotWriter(self._num_slots)
        try:
            return self._packed(*place, self._slots)
        except RecsysError as error:
            return error

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch."""
        known = self._plan is not None and epoch == self._epoch
        return self._plan if known else EpochPlan(self._source.row_groups, self.order, epoch)

    def begin(self, epoch: int) -> None:
        """Starts to read an epoch: counts from 0, with nothing in memory. Reading another one begins by
        itself."""
        self._plan = self.plan(epoch)
        self._epoch = epoch
        self._skipped: Counter[str] = Counter()
        self._blocks: Lru[Block] = Lru(resident_blocks(self._plan, self._num_readers))

    def filler(self) -> Arrays:
        """A batch without rows that count."""
        return self._new_packer().filler(self.order.batch_size)

    def _new_packer(self) -> Packer:
        return Packer(self._pipeline, self._rule, self._mode)

    def read(self, epoch: int, index: int) -> Arrays:
        """The arrays of batch `index` of an epoch's plan, in memory of their own.

        Raises:
            DataError: a bad row or file.
        """
        return self._packed(epoch, index, None).arrays()

    def _packed(self, epoch: int, index: int, slots: SlotWriter | None) -> Packed:
        if self._converter is None:
            self._converter = Converter(self._pipeline, self._rule, mode=self._mode)
            self._packer = self._new_packer()
        if epoch != self._epoch:
            self.begin(epoch)
        parts = [self._rows(part) for part in self._plan.batch(index)]
        packed = self._packer.packed(parts[0] if len(parts) == 1 else join(parts), slots)
        self._count(packed.others["counts"])
        return packed

    def _rows(self, part: Part) -> Block:
        block = self._blocks.get(part.block, lambda: self._mix(part.block))
        return block.select(slice(part.start, part.stop))

    def _mix(self, number: int) -> Block:
        """The rows of some row groups, mixed once, so that a batch is a slice of them."""
        members, order = self._plan.block(number)
        return join([self._convert(self._plan.groups[member]) for member in members], order)

    def _convert(self, group: RowGroup) -> Block:
        table = self._source.read(group.file, group.number, self._columns)
        path = self._source.files[group.file].path
        origin = Origin(group.file, group.first_row, path, self._epoch)
        return self._converter.block(table, origin, self._duplicates)

    def _count(self, counts: Counter[str]) -> None:
        self._skipped.update({reason: counts[reason] for reason in REASONS if counts[reason]})
        limit = self._pipeline.data.bad_rows.limit
        if self._skipped.total() > limit:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._skipped.most_common())
            raise DataError(
                f"{self._skipped.total()} rows were left out ({reasons}), more than "
                f"data.bad_rows.limit = {limit}. Correct the files, or raise the limit."
            )
