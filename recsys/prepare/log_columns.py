"""Names the columns of a log of events by their meaning, and holds pieces of its files as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from recsys.prepare.conditions import Signal
from recsys.prepare.ties import FILE, SHUFFLE

SECOND = 1_000_000
"""Microseconds per second; times are in microseconds until rows are cut."""
MICROSECONDS = {"s": SECOND, "ms": 1_000, "us": 1}
TIME_UNITS = (*MICROSECONDS, "iso")


@dataclass(frozen=True)
class LogColumns:
    """Names the columns of a log by their meaning.

    Attributes:
        user, item, time: names of the columns that every event has.
        time_unit: "s", "ms", "us" since 1970, or "iso" for dates as text (UTC if they name no zone).
        delimiter: delimiter of text files; None: a comma, or a tab for .tsv.
        ids: columns of categories to keep. numbers: columns of numbers to keep.
        lists: columns with several categories in a cell, with `list_delimiter` between them.
        fills: value that replaces empty cells, by column.
        labels: origin of each label, by name. regression: names of labels that may be any number; all other
            labels are 0 or 1.
        actions: origin of the bits 0, 1, ..., by name; without a condition, a bit is set if the column is
            above 0.
        watch_time: column, or None. watch_time_scale: seconds per unit of that column.
        ties: order of a user's events with the same time: `ties.FILE`, `ties.SHUFFLE`, or a sort column.
        seed: seed of the shuffle.
    """

    user: str
    item: str
    time: str
    time_unit: str = "s"
    delimiter: str | None = None
    ids: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    list_delimiter: str = "|"
    fills: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Signal] = field(default_factory=dict)
    regression: frozenset[str] = frozenset()
    actions: Mapping[str, Signal] = field(default_factory=dict)
    watch_time: str | None = None
    watch_time_scale: float = 1.0
    ties: str = FILE
    seed: int = 0

    def all(self) -> list[str]:
        """Returns the names of all columns to read, each once."""
        watch = [self.watch_time] if self.watch_time else []
        watch += [self.ties] if self.ties not in (FILE, SHUFFLE) else []
        names = [self.user, self.item, self.time, *self.ids, *self.lists, *self.numbers, *self.fills]
        signals = [signal.column for signal in (*self.labels.values(), *self.actions.values())]
        return list(dict.fromkeys([*names, *signals, *watch]))


class Piece(NamedTuple):
    """Consecutive events of one file, as text.

    Attributes:
        texts: text columns, with one event per row.
        where: name of the file in errors.
        first: line of the first event; events follow line by line.
        word: word for a line in errors.
        time_unit: unit of the times, one of `TIME_UNITS`.
        lines: int64 [events], the line of each event if a line holds several events; else None.
    """

    texts: pl.DataFrame
    where: str
    first: int
    word: str
    time_unit: str
    lines: np.ndarray | None = None
