"""Prepares converted rows for a package: cuts them into pieces of bounded length, reads whole histories."""

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
    """The events of some rows: int64 rows of the item table, end to end, and int64 [rows] events of each row.

    A row that was left out has no events.
    """

    items: np.ndarray
    lengths: np.ndarray

    def of(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the events of a run of rows, and the number of events of each row."""
        start, stop = self.lengths[: rows.start].sum(), self.lengths[: rows.stop].sum()
        return torch.from_numpy(self.items[start:stop]), torch.from_numpy(self.lengths[rows])


def in_pieces(block: ColumnBlock, most: int) -> ColumnBlock:
    """Splits the rows of a block that have more than `most` candidates into several rows, in the same order.

    A candidate's score depends on its own target group only, so with `most` from `piece_size` the scores are
    those of the whole rows, in the same order.
    """
    lengths = block.lengths[pb.CANDIDATE]
    row, cut = cut_into_pieces(lengths, most)
    if len(row) == len(lengths):
        return block
    # Pieces repeat the row and its history; candidates stay in place and are only counted anew.
    candidates = {name: column for name, column in block.flat.items() if column.side == pb.CANDIDATE}
    others = {name: column for name, column in block.flat.items() if column.side != pb.CANDIDATE}
    nothing = {**block.lengths, pb.CANDIDATE: np.zeros_like(lengths)}
    pieces = replace(block, flat=others, lengths=nothing).select(row)
    return replace(pieces, flat={**pieces.flat, **candidates}, lengths={**pieces.lengths, pb.CANDIDATE: cut})


class Pieces(NamedTuple):
    """The row of each piece and its number of candidates, both int64 [pieces]."""

    row: np.ndarray
    lengths: np.ndarray


def cut_into_pieces(lengths: np.ndarray, most: int) -> Pieces:
    """Cuts rows with `lengths` candidates into pieces of at most `most`; each row has at least one piece."""
    count = np.maximum(-(-lengths // most), 1)
    row = np.repeat(np.arange(len(lengths)), count)
    skipped = most * (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count))
    return Pieces(row, np.minimum(lengths[row] - skipped, most))


def whole_histories(table: pa.Table, block: ColumnBlock, column: str, vocabulary: Vocabulary) -> Histories:
    """Reads all events of a table's rows, including those beyond `data.max_history_len`.

    Args:
        table: the table from which `block` was converted.
        column: name of a single-valued id column of side HISTORY.
        vocabulary: the column's vocabulary.
    """
    good = block.codes == 0
    lists = Lists.of(one_array(table.filter(pa.array(good))[column]))
    lengths = np.zeros(len(good), np.int64)
    lengths[good] = lists.lengths
    return Histories(vocabulary.map(lists.values), lengths)


def runs(total: int, most: int) -> Iterator[slice]:
    """Yields 0, 1, ... total - 1 in runs of at most `most`."""
    for start in range(0, total, most):
        yield slice(start, min(start + most, total))


def bounded_runs(lengths: Sequence[int], rows: int, total: int) -> Iterator[slice]:
    """Yields runs of at most `rows` neighbors whose lengths sum to at most `total`; a longer one is alone."""
    start, held = 0, 0
    for place, length in enumerate(lengths):
        if place > start and (place - start == rows or held + length > total):
            yield slice(start, place)
            start, held = place, 0
        held += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def given_source(paths: Sequence[str] | None, pipeline: pb.Pipeline) -> pb.Source:
    """Returns the source of the rows to predict: files named on a command line, or else `data.test`.

    The files are CSV if all names end in `.csv` or `.csv.gz`, else parquet.

    Raises:
        ConfigError: no file is named, and the config has no `data.test`.
    """
    if not paths:
        if not pipeline.data.HasField("test"):
            raise ConfigError("--input: not given, and the package's config has no data.test to take rows of")
        return pipeline.data.test
    if all(path.endswith((".csv", ".csv.gz")) for path in paths):
        return pb.Source(csv=pb.CsvSource(paths=paths))
    return pb.Source(parquet=pb.ParquetSource(paths=paths))
