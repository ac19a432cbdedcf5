"""Converted rows as numpy arrays, and how to pick and join them.

`columns` makes a `Block` of each row group, `reader` joins and shuffles a few of them, `arrays` cuts batches
out of that. Columns are flat: of all rows (side USER), all events (HISTORY) or all candidates (CANDIDATE) one
after the other.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb


class Flat(NamedTuple):
    """A column laid end to end: one value a row / event / candidate.

    When it is multi-valued, element i has values[offsets[i] : offsets[i + 1]]; offsets start at 0 and end
    at the number of values.
    """

    side: int
    values: np.ndarray
    offsets: np.ndarray | None = None


@dataclass
class Block:
    """Some rows.

    Attributes:
        file: int64 [rows], index of the file in its source.
        row: int64 [rows], row of the file.
        codes: int8 [rows], why a row was left out: 0 it was not, else 1 + index into checks.REASONS. A row
            that was left out has no events, no candidates, and zeros in the columns of side USER.
        group: int64 [rows].
        lengths: by side (HISTORY, CANDIDATE), int64 [rows] number of elements; they follow each other in the
            columns.
        cut: by side, bool [rows] whether there were more in the file.
        flat: by column.
        keys: key columns as they stand in the file, when they are wanted.
    """

    file: np.ndarray
    row: np.ndarray
    codes: np.ndarray
    group: np.ndarray
    lengths: dict[int, np.ndarray]
    cut: dict[int, np.ndarray]
    flat: dict[str, Flat]
    keys: pa.Table | None = None

    def select(self, rows: np.ndarray | slice) -> "Block":
        """These rows in this order; views for a slice (which has a start and a stop)."""
        lengths = {side: lengths[rows] for side, lengths in self.lengths.items()}
        elements = {pb.USER: rows}
        for side, all_lengths in self.lengths.items():
            elements[side] = places((np.cumsum(all_lengths) - all_lengths)[rows], lengths[side])
        return Block(
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


def join(blocks: list[Block]) -> Block:
    """All rows of some blocks with the same columns, in memory of its own."""
    keys = [block.keys for block in blocks if block.keys is not None]
    return Block(
        file=np.concatenate([block.file for block in blocks]),
        row=np.concatenate([block.row for block in blocks]),
        codes=np.concatenate([block.codes for block in blocks]),
        group=np.concatenate([block.group for block in blocks]),
        lengths={
            side: np.concatenate([block.lengths[side] for block in blocks]) for side in blocks[0].lengths
        },
        cut={side: np.concatenate([block.cut[side] for block in blocks]) for side in blocks[0].cut},
        flat={name: _join([block.flat[name] for block in blocks]) for name in blocks[0].flat},
        keys=pa.concat_tables(keys) if keys else None,
    )


def pick(column: Flat, elements: np.ndarray | slice) -> Flat:
    """Some elements of a column, as `places` gives them."""
    if column.offsets is None:
        return column._replace(values=column.values[elements])
    if isinstance(elements, slice):
        offsets = column.offsets[elements.start : elements.stop + 1]
        return Flat(column.side, column.values[offsets[0] : offsets[-1]], offsets - offsets[0])
    starts = column.offsets[elements]
    counts = column.offsets[elements + 1] - starts
    return Flat(column.side, column.values[places(starts, counts)], offsets_of(counts))


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of counts."""
    return np.concatenate([[0], np.cumsum(counts)])


def places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | slice:
    """Flat places of runs; a slice when they follow each other without a gap, which costs no copy."""
    if len(starts) == 0:
        return slice(0, 0)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def _join(parts: list[Flat]) -> Flat:
    values = np.concatenate([part.values for part in parts])
    if parts[0].offsets is None:
        return Flat(parts[0].side, values)
    return Flat(parts[0].side, values, offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])))
