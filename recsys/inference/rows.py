"""Prepares converted rows for a package: cuts long rows into pieces, and rows into batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.data.convert.column_block import ColumnBlock
from recsys.errors import ConfigError


def in_pieces(block: ColumnBlock, max_len: int) -> ColumnBlock:
    """Splits rows with more than `max_len` candidates into several rows; candidates keep their order.

    A candidate's score depends on its own target group only. If `max_len` comes from `piece_size`, no group
    is split, so the scores equal those of the whole rows.
    """
    lengths = block.lengths[pb.CANDIDATE]
    row, cut = cut_into_pieces(lengths, max_len)
    if len(row) == len(lengths):
        return block
    # Pieces repeat the row and its history. Candidates stay in place; only their counts per row change.
    candidates = {name: column for name, column in block.flat.items() if column.side == pb.CANDIDATE}
    shared_columns = {name: column for name, column in block.flat.items() if column.side != pb.CANDIDATE}
    nothing = {**block.lengths, pb.CANDIDATE: np.zeros_like(lengths)}
    pieces = replace(block, flat=shared_columns, lengths=nothing).select(row)
    return replace(pieces, flat={**pieces.flat, **candidates}, lengths={**pieces.lengths, pb.CANDIDATE: cut})


class Pieces(NamedTuple):
    """The pieces that rows are cut into."""

    row: np.ndarray
    """int64 [pieces]: the row that each piece was cut from."""
    lengths: np.ndarray
    """int64 [pieces]: the number of candidates of each piece."""


def cut_into_pieces(lengths: np.ndarray, max_len: int) -> Pieces:
    """Cuts rows into pieces of at most `max_len` candidates. A row without candidates is one piece.

    Args:
        lengths: int64 [rows], the number of candidates of each row.
        max_len: the largest number of candidates of a piece.
    """
    count = np.maximum(-(-lengths // max_len), 1)
    row = np.repeat(np.arange(len(lengths)), count)
    skipped = max_len * (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count))
    return Pieces(row, np.minimum(lengths[row] - skipped, max_len))


def runs(total: int, max_len: int) -> Iterator[slice]:
    """Yields consecutive slices of at most `max_len` that cover 0, 1, ... `total` - 1."""
    for start in range(0, total, max_len):
        yield slice(start, min(start + max_len, total))


def bounded_runs(lengths: Sequence[int], rows: int, total: int) -> Iterator[slice]:
    """Yields slices of at most `rows` consecutive rows, whose lengths add up to at most `total`.

    A row longer than `total` gets its own slice.
    """
    start, num_candidates = 0, 0
    for place, length in enumerate(lengths):
        if place > start and (place - start == rows or num_candidates + length > total):
            yield slice(start, place)
            start, num_candidates = place, 0
        num_candidates += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def given_source(paths: Sequence[str] | None, pipeline: pb.Pipeline) -> pb.Source:
    """Returns the source of the rows to predict: the given files or, if there are none, `data.test`.

    Files are read as CSV if all names end in `.csv` or `.csv.gz`, else as parquet.

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
