"""Hashes of users and histories, by which a store of encoded users knows whether an entry is still right."""

import hashlib
from collections.abc import Callable

import numpy as np

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.data.convert.column_block import ColumnBlock, FlatColumn, flat_indices, pick
from recsys.data.convert.converter import REQUEST_TIME
from recsys.inference.shared_rows import without

_BYTES = 16
"""Length of a hash: two of 2^40 different histories have the same one with a probability of 2^-49."""


class Fingerprints:
    """Hashes everything that a row's cache is computed from: the columns of users and events.

    Args:
        block: converted rows.
        pipeline: the resolved config, by which the time of the request counts or does not.
    """

    def __init__(self, block: ColumnBlock, pipeline: pb.Pipeline):
        ignored = () if model_of(pipeline).history_reads_request_time else (REQUEST_TIME,)
        columns = [(name, column) for name, column in sorted(block.flat.items()) if name not in ignored]
        self._users = [_bytes_of(column) for _, column in columns if column.side == pb.USER]
        self._events = [_bytes_of(column) for _, column in columns if column.side == pb.HISTORY]
        self.num_events = block.lengths[pb.HISTORY].tolist()
        self._starts = (np.cumsum(block.lengths[pb.HISTORY]) - block.lengths[pb.HISTORY]).tolist()

    def digest(self, row: int, num_events: int) -> bytes:
        """Returns the hash of a row with its first `num_events` events only."""
        digest = hashlib.blake2b(num_events.to_bytes(8, "little"), digest_size=_BYTES)
        for column in self._users:
            column(digest.update, row, row + 1)
        for column in self._events:
            column(digest.update, self._starts[row], self._starts[row] + num_events)
        return digest.digest()


def later_events(block: ColumnBlock, skipped: np.ndarray) -> ColumnBlock:
    """Returns the rows with their later events only, and no candidates.

    Args:
        block: converted rows.
        skipped: int64 [rows], number of the oldest events of each row to leave out.
    """
    lengths = block.lengths[pb.HISTORY]
    events = flat_indices(np.cumsum(lengths) - lengths + skipped, lengths - skipped)
    flat = {
        name: pick(column, events) if column.side == pb.HISTORY else column
        for name, column in block.flat.items()
    }
    rest = ColumnBlock(
        file=block.file,
        row=block.row,
        codes=block.codes,
        group=block.group,
        lengths={**block.lengths, pb.HISTORY: lengths - skipped},
        cut=block.cut,
        flat=flat,
    )
    return without(rest, pb.CANDIDATE)


def _bytes_of(column: FlatColumn) -> Callable[[Callable[[memoryview], None], int, int], None]:
    """Returns a function that passes the bytes of elements `first` to `stop` - 1 of a column on.

    Integers are int64 always: their type in a block depends on its largest value.
    """
    values, offsets = column.values, column.offsets
    if values.dtype.kind in "iub":
        values = values.astype(np.int64, copy=False)
    values = np.ascontiguousarray(values)

    def plain(update: Callable[[memoryview], None], first: int, stop: int) -> None:
        update(values[first:stop].data)

    def lists(update: Callable[[memoryview], None], first: int, stop: int) -> None:
        bounds = offsets[first : stop + 1]
        update(np.diff(bounds).data)
        update(values[bounds[0] : bounds[-1]].data)

    return plain if offsets is None else lists
