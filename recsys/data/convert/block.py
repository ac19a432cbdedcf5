"""Converted rows as numpy arrays, and how to pick and join them.

`columns` makes a `Block` of each row group, `reader` joins and shuffles a few of them, `arrays` cuts batches
out of that. Columns are flat: of all rows (side USER), all events (HISTORY) or all candidates (CANDIDATE) one
after the other.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb

_ALIGNMENT = 64


class Flat(NamedTuple):
    """A column laid end to end: one value a row / event / candidate. Integers are int32 where that is enough.

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

    @cached_property
    def _starts(self) -> dict[int, np.ndarray]:
        """By side, where the elements of each row begin."""
        return {side: np.cumsum(lengths) - lengths for side, lengths in self.lengths.items()}

    def select(self, rows: np.ndarray | slice) -> "Block":
        """These rows in this order; views for a slice (which has a start and a stop)."""
        lengths = {side: lengths[rows] for side, lengths in self.lengths.items()}
        elements = {pb.USER: rows}
        for side, starts in self._starts.items():
            elements[side] = places(starts[rows], lengths[side])
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


def join(blocks: list[Block], order: np.ndarray | None = None) -> Block:
    """All rows of some blocks with the same columns, in memory of its own.

    Args:
        order: int64 permutation of the rows laid end to end; None to leave them.
    """
    row = np.concatenate([block.row for block in blocks])
    rows = slice(0, len(row)) if order is None else order
    lengths = {side: np.concatenate([block.lengths[side] for block in blocks]) for side in blocks[0].lengths}
    elements = {pb.USER: rows}
    for side, own in lengths.items():
        elements[side] = places((np.cumsum(own) - own)[rows], own[rows])
    keys = [block.keys for block in blocks if block.keys is not None]
    keys = pa.concat_tables(keys) if keys else None
    return Block(
        file=np.concatenate([block.file for block in blocks])[rows],
        row=row[rows],
        codes=np.concatenate([block.codes for block in blocks])[rows],
        group=np.concatenate([block.group for block in blocks])[rows],
        lengths={side: own[rows] for side, own in lengths.items()},
        cut={side: np.concatenate([block.cut[side] for block in blocks])[rows] for side in blocks[0].cut},
        flat=_join_columns([block.flat for block in blocks], elements),
        keys=keys if keys is None or order is None else keys.take(pa.array(order)),
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
    found = np.repeat(starts - (ends - lengths), lengths)
    found += np.arange(len(found))
    return found


def _join_columns(blocks: list[dict[str, Flat]], elements: dict[int, np.ndarray | slice]) -> dict[str, Flat]:
    """`elements` by side are picked from the columns of all blocks laid end to end."""
    parts = {name: [flat[name].values for flat in blocks] for name in blocks[0]}
    types = {name: np.result_type(*own) for name, own in parts.items()}
    counts = {name: sum(map(len, own)) for name, own in parts.items()}
    sizes = {
        name: -(-count * types[name].itemsize // _ALIGNMENT) * _ALIGNMENT for name, count in counts.items()
    }
    # The system gives and takes one large piece of memory with less effort than many.
    memory, start, found = np.empty(sum(sizes.values()), np.uint8), 0, {}
    # Column by column: there is room for one in the processor's cache.
    for name, own in parts.items():
        out = memory[start : start + counts[name] * types[name].itemsize].view(types[name])
        start += sizes[name]
        columns = [flat[name] for flat in blocks]
        wanted = elements[columns[0].side]
        if columns[0].offsets is not None:
            offsets = offsets_of(np.concatenate([np.diff(column.offsets) for column in columns]))
            found[name] = pick(Flat(columns[0].side, np.concatenate(own, out=out), offsets), wanted)
        elif isinstance(wanted, slice):
            found[name] = Flat(columns[0].side, np.concatenate(own, out=out)[wanted])
        else:
            # They are all in range; without a mode each would be looked at twice.
            found[name] = Flat(columns[0].side, np.concatenate(own).take(wanted, out=out, mode="clip"))
    return found
