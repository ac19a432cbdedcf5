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

_LISTS = (pb.HISTORY, pb.CANDIDATE)


class Flat(NamedTuple):
    """A column laid end to end. `counts` is None, or the number of values of each row / event / candidate."""

    side: int
    values: np.ndarray
    counts: np.ndarray | None = None


class Spans(NamedTuple):
    """Which elements belong to each row: lengths[i] of them from starts[i] on.

    Truncation and leaving out a row only move these. `cut` says of which rows elements were truncated.
    """

    starts: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray


@dataclass
class Block:
    """Some rows.

    Attributes:
        file: int64 [rows], index of the file in its source.
        row: int64 [rows], row of the file.
        codes: int8 [rows], why a row was left out: 0 it was not, else 1 + index into checks.REASONS. A row
            that was left out has no events, no candidates, and zeros in the columns of side USER.
        group: int64 [rows].
        spans: of HISTORY and CANDIDATE.
        flat: by column.
        keys: key columns as they stand in the file, when they are wanted.
    """

    file: np.ndarray
    row: np.ndarray
    codes: np.ndarray
    group: np.ndarray
    spans: dict[int, Spans]
    flat: dict[str, Flat]
    keys: pa.Table | None = None

    def select(self, rows: np.ndarray | slice) -> "Block":
        """These rows in this order, without what no row refers to. A slice gives views where nothing was left
        out."""
        elements: dict[int, np.ndarray | slice] = {pb.USER: rows}
        spans = {}
        for side in _LISTS:
            starts, lengths = self.spans[side].starts[rows], self.spans[side].lengths[rows]
            elements[side] = _places(starts, lengths)
            spans[side] = Spans(np.cumsum(lengths) - lengths, lengths, self.spans[side].cut[rows])
        keys = None
        if self.keys is not None:
            whole = isinstance(rows, slice)
            keys = (
                self.keys.slice(rows.start, rows.stop - rows.start)
                if whole
                else self.keys.take(pa.array(rows))
            )
        return Block(
            file=self.file[rows],
            row=self.row[rows],
            codes=self.codes[rows],
            group=self.group[rows],
            spans=spans,
            flat={name: _pick(column, elements[column.side]) for name, column in self.flat.items()},
            keys=keys,
        )


def join(blocks: list[Block]) -> Block:
    """All rows of some blocks with the same columns, in memory of its own."""
    spans = {}
    for side in _LISTS:
        first = np.cumsum([0] + [_size(block, side) for block in blocks])
        parts = [block.spans[side] for block in blocks]
        spans[side] = Spans(
            np.concatenate([part.starts + offset for part, offset in zip(parts, first, strict=False)]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.cut for part in parts]),
        )
    keys = [block.keys for block in blocks if block.keys is not None]
    return Block(
        file=np.concatenate([block.file for block in blocks]),
        row=np.concatenate([block.row for block in blocks]),
        codes=np.concatenate([block.codes for block in blocks]),
        group=np.concatenate([block.group for block in blocks]),
        spans=spans,
        flat={name: _join([block.flat[name] for block in blocks]) for name in blocks[0].flat},
        # Copied, since a slice would be sent to another process with all of its table.
        keys=pa.concat_tables(keys).combine_chunks() if keys else None,
    )


def _pick(column: Flat, elements: np.ndarray | slice) -> Flat:
    if column.counts is None:
        return column._replace(values=column.values[elements])
    ends, counts = np.cumsum(column.counts), column.counts[elements]
    return Flat(column.side, column.values[_places(ends[elements] - counts, counts)], counts)


def _join(parts: list[Flat]) -> Flat:
    counts = None if parts[0].counts is None else np.concatenate([part.counts for part in parts])
    return Flat(parts[0].side, np.concatenate([part.values for part in parts]), counts)


def _size(block: Block, side: int) -> int:
    """Elements that the columns of one side hold, whether rows refer to them or not."""
    for column in block.flat.values():
        if column.side == side:
            return len(column.values if column.counts is None else column.counts)
    return 0


def _places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | slice:
    """Flat places of runs; a slice when they follow each other without a gap, which costs no copy."""
    if len(starts) == 0:
        return slice(0, 0)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
