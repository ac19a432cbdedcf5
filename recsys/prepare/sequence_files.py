"""Reads text files with one line per user: `user item item ...`, oldest event first, separated by blanks.

A second file of the same form, `user time time ...`, may hold the time of each item at the same position.
Files may end in .gz.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl

from recsys.errors import DataError, shortened
from recsys.prepare.log_columns import Piece
from recsys.prepare.text_tables import UNREADABLE

USER, ITEM, TIME = "user", "item", "time"
"""Names of the columns of events read from these files."""

PIECE_EVENTS = 1 << 17
"""Approximate number of events per piece; a piece ends at the end of a line."""


def read_sequences(path: Path, times: Path | None, time_unit: str) -> Iterator[Piece]:
    """Yields the events of a file of sequences, about 130,000 at a time.

    Args:
        path: the file of items.
        times: the file of times; None numbers the events of each user from 1.
        time_unit: unit of the times, one of `events.TIME_UNITS`.

    Raises:
        DataError: a file does not exist, or lines of the two files do not match; names file and line.
    """
    users: list[str] = []
    items: list[str] = []
    moments: list[str] = []
    lines: list[int] = []

    def piece() -> Piece:
        texts = pl.DataFrame({USER: users, ITEM: items, TIME: moments})
        return Piece(texts, str(path), 0, "line", time_unit, np.array(lines))

    with _open(path) as item_file, _open(times) if times else nullcontext([]) as time_file:
        time_lines = _lines(time_file, times) if times else []
        pairs = zip_longest(_lines(item_file, path), time_lines, fillvalue="")
        for number, (line, time_line) in enumerate(pairs, start=1):
            fields = line.split()
            when = time_line.split() if times else [str(place) for place in range(len(fields))]
            if times and (fields[:1] != when[:1] or len(fields) != len(when)):
                raise DataError(
                    f"{times}, line {number}: {_summary(when)}, but {path} has {_summary(fields)} there; "
                    "both must have the same users in the same order, and a time for each item"
                )
            users += fields[:1] * (len(fields) - 1)
            items += fields[1:]
            moments += when[1:]
            lines += [number] * (len(fields) - 1)
            if len(items) >= PIECE_EVENTS:
                yield piece()
                users, items, moments, lines = [], [], [], []
    if items:
        yield piece()


def _summary(fields: list[str]) -> str:
    if not fields:
        return "no user"
    user = fields[0] if len(fields[0]) < 80 else shortened(fields[0])
    return f"user {user} with {len(fields) - 1} events"


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yields the lines of a file as text.

    Raises:
        DataError: the file is cut off, damaged, or not UTF-8.
    """
    number = 1
    try:
        for number, line in enumerate(file, start=1):
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}, line {number}: byte {byte:#04x} is not UTF-8; convert the file to it"
        ) from error
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}; is it complete?") from error


def _open(path: Path) -> BinaryIO:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
