"""Orders tied events, the events of one user with the same time.

The order changes targets and histories, so it belongs to the protocol of an evaluation. `schema.json` records
it, with the share of neighboring events that tie.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from recsys.data.hashing import combine

FILE, SHUFFLE = "file", "shuffle"
TIE = ".tie"
"""Column by which ties are sorted; no feature has this name."""


def add_flags(flags: argparse.ArgumentParser, keys: Sequence[str] | None) -> None:
    """Adds `--ties` and `--seed`.

    Args:
        flags: the parser of a tool.
        keys: columns that events can be sorted by; None for any column of the input.
    """
    column = ", or the name of a column to sort by" if keys is None else ""
    flags.add_argument(
        "--ties",
        default=FILE,
        choices=None if keys is None else (FILE, SHUFFLE, *keys),
        metavar="ORDER" if keys is None else None,
        help=f"order of a user's events that have equal times: {FILE} (order of the input; default) or "
        f"{SHUFFLE}{column}",
    )
    flags.add_argument("--seed", type=_seed, default=0, help=f"seed of --ties {SHUFFLE} (default: 0)")


def shuffle_keys(order: np.ndarray, seed: int) -> pl.Series:
    """Draws a number for each event from its position in the input and the seed; uint64 [n], named `TIE`."""
    return pl.Series(TIE, combine(seed, order))


def sort_events(events: pl.DataFrame, user: str, time: str, ties: str, seed: int) -> pl.DataFrame:
    """Sorts events by user and time; sorts ties by `ties`, then by `order`, their position in the input."""
    if ties == SHUFFLE:
        drawn = shuffle_keys(events["order"].to_numpy().astype(np.int64), seed)
        return events.with_columns(drawn).sort(user, time, TIE, "order").drop(TIE)
    return events.sort(user, time, *([] if ties == FILE else [ties]), "order")


class TieCounter:
    """Counts pairs of neighboring events of one user, and the pairs that tie."""

    def __init__(self) -> None:
        self.neighbors = self.tied = 0

    def add(self, user: np.ndarray, time: np.ndarray) -> None:
        """Adds events [n] that are sorted by user and time; `user` holds the number of each event's user."""
        same_user = user[1:] == user[:-1]
        self.neighbors += int(same_user.sum())
        self.tied += int((same_user & (time[1:] == time[:-1])).sum())

    def describe(self, ties: str, seed: int) -> dict[str, Any]:
        """Returns the entry `ties` of schema.json."""
        drawn = {"seed": seed} if ties == SHUFFLE else {}
        return {"order": ties, **drawn, "share": round(self.tied / max(self.neighbors, 1), 4)}


def report(entry: Mapping[str, Any]) -> str:
    """Formats the entry `ties` of schema.json as a line of a tool's output."""
    orders = {FILE: "in the order of the input", SHUFFLE: f"shuffled with seed {entry.get('seed')}"}
    order = orders.get(str(entry["order"]), f"by {entry['order']}")
    share = f"{100 * entry['share']:.1f} %"
    return f"{share} of neighboring events of a user have the same time; these are {order}"


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer from 0 to 10^18 - 1")
    return int(text)
