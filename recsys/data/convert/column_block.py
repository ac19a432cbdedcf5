"""Holds converted rows as numpy arrays, and selects and joins them.

`converter` makes a `ColumnBlock` of each row group, `workers.reader` joins and shuffles a few of them, and
`packer` makes batches of the result. Columns are flat: the values of all rows (side USER), all events
(HISTORY) or all candidates (CANDIDATE) one after the other.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb

_ALIGNMENT = 64


class FlatColumn(NamedTuple):
    """A column as one array with one value per row, event or candidate. Integers are int32 if they fit.

    Attributes:
        side: pb.USER, pb.HISTORY or pb.CANDIDATE.
        values: [elements], [elements, numbers] of a feature with several numbers, or all values of a
            multi-valued column.
        offsets: int64 [elements + 1] for a multi-valued column, whose element i has
            values[offsets[i] : offsets[i + 1]]; else None.
    """

    side: int
    values: np.ndarray
    offsets: np.ndarray | None = None


@dataclass
class ColumnBlock:
    """Converted rows.

    Attributes:
        file: int64 [rows], index of the file in its source.
        row: int64 [rows], row of the file.
        codes: int8 [rows], 0 for a good row, else 1 + index into row_checks.REASONS. A row that was left out
            has no events, no candidates, and zeros in the columns of side USER.
        group: int64 [rows], hash of the row's user, for per-user metrics.
        lengths: by side (HISTORY, CANDIDATE), int64 [rows] number of elements.
        cut: by side, bool [rows], True if the file has more elements than were read.
        flat: columns by name.
        keys: key columns, unchanged from the file; None in training.
        bad_rows: in prediction that leaves bad rows out, a sentence about each of them by its index here.
            Neither `select` nor `join` keeps it.
    """

    file: np.ndarray
    row: np.ndarray
    codes: np.ndarray
    group: np.ndarray
    lengths: dict[int, np.ndarray]
    cut: dict[int, np.ndarray]
    flat: dict[str, FlatColumn]
    keys: pa.Table | None = None
    bad_rows: dict[int, str] = field(default_factory=dict)

    @cached_property
    def _starts(self) -> dict[int, np.ndarray]:
        """Returns the index of each row's first element, by side."""
        return {side: np.cumsum(lengths) - lengths for side, lengths in self.lengths.items()}

    def select(self, rows: np.ndarray | slice) -> "ColumnBlock":
        """Selects rows in the given order. A slice, which must have a start and a stop, gives views."""
        lengths = {side: lengths[rows] for side, lengths in self.lengths.items()}
        elements = {pb.USER: rows}
        for side, starts in self._starts.items():
            elements[side] = flat_indices(starts[rows], lengths[side])
        return ColumnBlock(
            file=self.file[rows],
            row=self.row[rows],
            codes=self.codes[rows],
            group=self.group[rows],
            lengths=lengths,
            cut={side: cut[rows] for side, cut in self.cut.items()},
            flat={name: pick(column, elements[column.side]) for name, column in self.flat.items()},
            keys=self._keys_of(rows),
        )

    def _keys_of(self, rows: np.ndarray | slice) -> pa.Table | None:
        if self.keys is None:
            return None
        if isinstance(rows, slice):
            return self.keys.slice(rows.start, rows.stop - rows.start)
        return self.keys.take(pa.array(rows))


def join(blocks: list[ColumnBlock], order: np.ndarray | None = None) -> ColumnBlock:
    """Joins the rows of blocks with the same columns, in new memory.

    Args:
        blocks: at least one.
        order: int64 permutation of all rows; None keeps their order.
    """
    row = np.concatenate([block.row for block in blocks])
    rows = slice(0, len(row)) if order is None else order
    lengths = {side: np.concatenate([block.lengths[side] for block in blocks]) for side in blocks[0].lengths}
    elements = {pb.USER: rows}
    for side, counts in lengths.items():
        elements[side] = flat_indices((np.cumsum(counts) - counts)[rows], counts[rows])
    keys = [block.keys for block in blocks if block.keys is not None]
    keys = pa.concat_tables(keys) if keys else None
    return ColumnBlock(
        file=np.concatenate([block.file for block in blocks])[rows],
        row=row[rows],
        codes=np.concatenate([block.codes for block in blocks])[rows],
        group=np.concatenate([block.group for block in blocks])[rows],
        lengths={side: counts[rows] for side, counts in lengths.items()},
        cut={side: np.concatenate([block.cut[side] for block in blocks])[rows] for side in blocks[0].cut},
        flat=_join_columns([block.flat for block in blocks], elements),
        keys=keys if keys is None or order is None else keys.take(pa.array(order)),
    )


def pick(column: FlatColumn, elements: np.ndarray | slice) -> FlatColumn:
    """Selects elements of a column, by indices or a slice from `flat_indices`."""
    if column.offsets is None:
        return FlatColumn(column.side, column.values[elements])
    if isinstance(elements, slice):
        offsets = column.offsets[elements.start : elements.stop + 1]
        return FlatColumn(column.side, column.values[offsets[0] : offsets[-1]], offsets - offsets[0])
    starts = column.offsets[elements]
    counts = column.offsets[elements + 1] - starts
    return FlatColumn(column.side, column.values[flat_indices(starts, counts)], offsets_of(counts))


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Returns 0 followed by the running sums of counts, int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)])


def counts_of(offsets: np.ndarray) -> np.ndarray:
    """Returns the differences of offsets, int64 [n], as `np.diff` does, which takes three times as long."""
    return offsets[1:] - offsets[:-1]


def flat_indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | slice:
    """Returns the indices of runs of elements, or a slice, which needs no copy, if the runs are adjacent."""
    if len(starts) == 0:
        return slice(0, 0)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    ends = np.cumsum(lengths)
    indices = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def _join_columns(
    blocks: list[dict[str, FlatColumn]], elements: dict[int, np.ndarray | slice]
) -> dict[str, FlatColumn]:
    """Joins the columns of all blocks and selects their elements, which are given by side."""
    parts = {name: [flat[name].values for flat in blocks] for name in blocks[0]}
    types = {name: np.result_type(*arrays) for name, arrays in parts.items()}
    counts = {name: sum(map(len, arrays)) for name, arrays in parts.items()}
    shapes = {name: (counts[name], *arrays[0].shape[1:]) for name, arrays in parts.items()}
    num_bytes = {name: math.prod(shape) * types[name].itemsize for name, shape in shapes.items()}
    sizes = {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in num_bytes.items()}
    # One large allocation costs the system less than many small ones.
    memory, start, joined = np.empty(sum(sizes.values()), np.uint8), 0, {}
    # Column by column, because one column fits into the processor's cache.
    for name, arrays in parts.items():
        out = memory[start : start + num_bytes[name]].view(types[name]).reshape(shapes[name])
        start += sizes[name]
        columns = [flat[name] for flat in blocks]
        wanted = elements[columns[0].side]
        if columns[0].offsets is not None:
            offsets = offsets_of(np.concatenate([counts_of(column.offsets) for column in columns]))
            joined[name] = pick(FlatColumn(columns[0].side, np.concatenate(arrays, out=out), offsets), wanted)
        elif isinstance(wanted, slice):
            joined[name] = FlatColumn(columns[0].side, np.concatenate(arrays, out=out)[wanted])
        else:
            # All indices are in range; mode="clip" saves numpy a second pass that checks them.
            joined[name] = FlatColumn(
                columns[0].side, np.concatenate(arrays).take(wanted, axis=0, out=out, mode="clip")
            )
    return joined
