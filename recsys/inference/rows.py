"""Converted rows on their way into a package: cut into pieces of bearable length, with their whole histories
beside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from recsys import protos as pb
from recsys.data.arrow import one_array
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.row_checks import Lists
from recsys.data.schema.vocabulary import Vocabulary
from recsys.errors import ConfigError


@dataclass
class Histories:
    """Events of rows: int64 table rows, one event after the other, and int64 [rows] events of each row.

    A row that was left out has none.
    """

    items: np.ndarray
    lengths: np.ndarray

    def of(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Events of a run of rows and their numbers."""
        start, stop = self.lengths[: rows.start].sum(), self.lengths[: rows.stop].sum()
        return torch.from_numpy(self.items[start:stop]), torch.from_numpy(self.lengths[rows])


def in_pieces(block: ColumnBlock, most: int) -> ColumnBlock:
    """The rows of a block, one after the other, those with more than `most` candidates as several rows.

    A candidate's score depends on no candidate but those of its target group, so with a `piece_size` the
    scores are those of the whole rows, in the same order.
    """
    lengths = block.lengths[pb.CANDIDATE]
    row, cut = cut_into_pieces(lengths, most)
    if len(row) == len(lengths):
        return block
    # Pieces repeat the row and its history; candidates stay where they are and are only counted anew.
    candidates = {name: column for name, column in block.flat.items() if column.side == pb.CANDIDATE}
    others = {name: column for name, column in block.flat.items() if column.side != pb.CANDIDATE}
    nothing = {**block.lengths, pb.CANDIDATE: np.zeros_like(lengths)}
    pieces = replace(block, flat=others, lengths=nothing).select(row)
    return replace(pieces, flat={**pieces.flat, **candidates}, lengths={**pieces.lengths, pb.CANDIDATE: cut})


class Pieces(NamedTuple):
    """int64 [pieces], the row that each piece is of, and its candidates."""

    row: np.ndarray
    lengths: np.ndarray


def cut_into_pieces(lengths: np.ndarray, most: int) -> Pieces:
    """Rows with `lengths` candidates, cut so that no piece has more than `most`; each row has a piece."""
    count = np.maximum(-(-lengths // most), 1)
    row = np.repeat(np.arange(len(lengths)), count)
    skipped = most * (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count))
    return Pieces(row, np.minimum(lengths[row] - skipped, most))


def whole_histories(table: pa.Table, block: ColumnBlock, column: str, vocabulary: Vocabulary) -> Histories:
    """All events of a table's rows, those beyond `data.max_history_len` too.

    Args:
        table: that `block` was converted from.
        column: single-valued id column of the side HISTORY.
        vocabulary: of the column.
    """
    good = block.codes == 0
    lists = Lists.of(one_array(table.filter(pa.array(good))[column]))
    lengths = np.zeros(len(good), np.int64)
    lengths[good] = lists.lengths
    return Histories(vocabulary.map(lists.values), lengths)


def runs(total: int, most: int) -> Iterator[slice]:
    """0, 1, ... total - 1 in runs of at most `most`."""
    for start in range(0, total, most):
        yield slice(start, min(start + most, total))


def bounded_runs(lengths: Sequence[int], rows: int, total: int) -> Iterator[slice]:
    """Neighbours in runs of at most `rows` whose lengths add up to at most `total`; a longer one is alone."""
    start, held = 0, 0
    for place, length in enumerate(lengths):
        if place > start and (place - start == rows or held + length > total):
            yield slice(start, place)
            start, held = place, 0
        held += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def given_source(paths: Sequence[str] | None, pipeline: pb.Pipeline) -> pb.Source:
    """The rows to predict for: files named on a command line, else those of `data.test`.

    Files are CSV when all end in `.csv` or `.csv.gz`, else parquet.

    Raises:
        ConfigError: neither is there.
    """
    if not paths:
        if not pipeline.data.HasField("test"):
            raise ConfigError("--input: not given, and the package's config has no data.test to take rows of")
        return pipeline.data.test
    if all(path.endswith((".csv", ".csv.gz")) for path in paths):
        return pb.Source(csv=pb.CsvSource(paths=paths))
    return pb.Source(parquet=pb.ParquetSource(paths=paths))
