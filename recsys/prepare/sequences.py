"""Reads the form in which benchmarks of sequential recommendation are often passed on, for prepare_csv.py.

A line is a user: `user item item ...`, oldest event first, separated by blanks. A second file of the same
form may hold the times: `user time time ...`, line by line and place by place. Files may end in .gz.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import polars as pl

from recsys.errors import DataError

USER, ITEM, TIME = "user", "item", "time"
"""Columns of what is read."""

EVENTS_OF_A_PIECE = 1 << 17


class SequencePiece(NamedTuple):
    """Events of some lines: text columns USER, ITEM and TIME, and int64 [events] the line of each."""

    texts: pl.DataFrame
    lines: np.ndarray


def sequence_pieces(path: Path, times: Path | None) -> Iterator[SequencePiece]:
    """The events of a file of sequences, some 100,000 at a time.

    Args:
        path: of the items.
        times: of the times; None numbers the events of each user from 1.

    Raises:
        DataError: no such file, or two lines that do not belong together; with file and line.
    """
    users: list[str] = []
    items: list[str] = []
    moments: list[str] = []
    lines: list[int] = []
    with _open(path) as file, _open(times) if times else nullcontext([]) as clock:
        for number, (line, beside) in enumerate(zip_longest(file, clock, fillvalue=""), start=1):
            fields = line.split()
            when = beside.split() if times else [str(place) for place in range(len(fields))]
            if times and (fields[:1] != when[:1] or len(fields) != len(when)):
                raise DataError(
                    f"{times}, line {number}: {_said(when)}, but {path} has {_said(fields)} there; both must "
                    "have the same users in the same order, and a time for each item"
                )
            users += fields[:1] * (len(fields) - 1)
            items += fields[1:]
            moments += when[1:]
            lines += [number] * (len(fields) - 1)
            if len(items) >= EVENTS_OF_A_PIECE:
                yield _piece(users, items, moments, lines)
                users, items, moments, lines = [], [], [], []
    if items:
        yield _piece(users, items, moments, lines)


def _piece(users: list[str], items: list[str], moments: list[str], lines: list[int]) -> SequencePiece:
    return SequencePiece(pl.DataFrame({USER: users, ITEM: items, TIME: moments}), np.array(lines))


def _said(fields: list[str]) -> str:
    return f"user {fields[0]} with {len(fields) - 1} events" if fields else "no user"


def _open(path: Path) -> TextIO:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
