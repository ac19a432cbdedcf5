"""Reads candidates to score, and writes them as the rows `latest`, with histories up to the end of the log.

A row is a user with all of the user's candidates, at the time of the log's last event. Features that the file
of candidates lacks are taken from the last event of the item or user.
"""

from pathlib import Path

import numpy as np
import polars as pl

from recsys.errors import DataError, shortened
from recsys.prepare.dataset_writer import LATEST, DatasetWriter, plain_table
from recsys.prepare.events import Log, convert_features
from recsys.prepare.items import items_of, join_items
from recsys.prepare.log_columns import SECOND, LogColumns
from recsys.prepare.log_files import read_log
from recsys.prepare.rows import Slices, run_starts
from recsys.prepare.text_tables import NUMBER, is_integer_text, typed

PLACE = ".place"
"""Column with the file and line of a candidate, for errors; no feature has this name."""

UNKNOWN_ID = 2**63 - 1
"""Stands for an unknown id where ids are whole numbers; no vocabulary has it."""


def read_candidates(path: Path, columns: LogColumns) -> pl.DataFrame:
    """Reads a file with one line per candidate: the columns of user and item, and any columns of features.

    Returns:
        Columns user_id, item_id and ids of features as text, numbers as float32, and `PLACE`.

    Raises:
        DataError: the file or a column is missing, a value is bad, or there is no candidate; names file and
            line.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    names, features = [columns.user, columns.item], [*columns.ids, *columns.lists, *columns.numbers]
    frames = []
    for piece in read_log(path, columns, names=names, optional=features):
        lines = pl.int_range(piece.first, piece.first + piece.texts.height, eager=True)
        place = pl.format(f"{{}}, {piece.word} {{}}", pl.lit(piece.where), lines)
        frames.append(pl.DataFrame(convert_features(piece, columns)).with_columns(place.alias(PLACE)))
    if not sum(frame.height for frame in frames):
        raise DataError(f"{path}: no candidates after the header")
    return pl.concat(frames)


def write_latest(
    writer: DatasetWriter, log: Log, candidates: pl.DataFrame, columns: LogColumns, max_history: int
) -> list[str]:
    """Writes the rows `latest`; the rows of users without an event come last.

    Args:
        writer: writer of the data set.
        log: all events.
        candidates: candidates as `read_candidates` returns them.
        columns: meaning of the log's columns.
        max_history: number of newest events that a history keeps.

    Returns:
        Lines to print about unknown users and items, and about repeated lines.

    Raises:
        DataError: an id does not fit the ids of the log, or a number is unknown.
    """
    users = [feature.name for feature in writer.contents.features if feature.sides == ("USER",)]
    features = [feature.name for feature in writer.contents.features[1:] if feature.name not in users]
    asked = _as_in_log(candidates, log, columns)
    different = [name for name in asked.columns if name != PLACE]
    asked = asked.unique(subset=different, keep="first", maintain_order=True)
    items = _last_of_items(log, asked, features)
    from_log = [name for name in features if name not in asked.columns]
    new_items = asked.select("item_id").unique().join(items, on="item_id", how="anti").height
    asked = asked.join(items.select("item_id", *from_log), on="item_id", how="left", maintain_order="left")
    asked = _without_nulls(asked, from_log, log, columns)
    keys = ["user_id", *(name for name in users if name in asked.columns)]
    requests = asked.group_by(keys, maintain_order=True).agg(pl.all().exclude(keys))
    requests = requests.with_columns(request_id=pl.int_range(log.num_rows, log.num_rows + pl.len()))
    latest = _Latest(writer, log, columns, users, max_history)
    for number in range(len(log.parts)):
        events = log.part(number).join(requests, on="user_id", how="semi", maintain_order="left")
        chosen = requests.join(events, on="user_id", how="semi", maintain_order="left")
        latest.write(number, events, chosen)
        requests = requests.join(events, on="user_id", how="anti", maintain_order="left")
    latest.write(len(log.parts), log.part(0).clear(), requests)
    notes = []
    new_users = requests["user_id"].n_unique()
    if new_users or new_items:
        notes.append(
            f"candidates without an event in the log: {new_users} of {asked['user_id'].n_unique()} users "
            f"(empty history), {new_items} of {asked['item_id'].n_unique()} items (unknown to a model)"
        )
    if repeated := candidates.height - asked.height:
        notes.append(f"candidates left out because they repeat an earlier line: {repeated}")
    return notes


class _Latest:
    """Writes the rows `latest`, one part of the log after the other."""

    def __init__(
        self, writer: DatasetWriter, log: Log, columns: LogColumns, users: list[str], max_history: int
    ) -> None:
        self._writer = writer
        self._log = log
        self._columns = columns
        self._users = users
        self._max_history = max_history

    def write(self, number: int, events: pl.DataFrame, requests: pl.DataFrame) -> None:
        """Writes the rows of `requests`, whose histories are among `events`, by user and time."""
        if not requests.height:
            return
        now = self._log.last_time // SECOND
        asked = requests.select(pl.exclude("user_id", "request_id", PLACE, *self._users)).explode(pl.all())
        asked = asked.with_columns(timestamps=pl.lit(now, pl.Int64))
        slices = self._slices(events, requests)
        user_columns = [name for name in self._users if name not in requests.columns]
        last = events.group_by("user_id").agg(pl.col(user_columns).last())
        rows = requests.join(last, on="user_id", how="left", maintain_order="left")
        rows = _without_nulls(rows, user_columns, self._log, self._columns)
        rows = rows.select("user_id", "request_id", pl.lit(now, pl.Int64).alias("request_time"), *self._users)
        table = plain_table(pl.concat([events, asked], how="diagonal"))
        self._writer.write(LATEST, f"{LATEST}/part-{number:05d}.parquet", table, slices, plain_table(rows))

    def _slices(self, events: pl.DataFrame, requests: pl.DataFrame) -> Slices:
        """Makes slices of a table of the events followed by the candidates of all requests."""
        user = events["user_id"].rle_id().to_numpy()
        index = np.arange(len(user))
        first = np.flatnonzero(run_starts(user) == index)
        bounds = events[pl.Series(first, dtype=pl.Int64)].select(
            "user_id", start=pl.Series(first), stop=pl.Series(np.append(first[1:], len(user))[: len(first)])
        )
        bounds = requests.join(bounds, on="user_id", how="left", maintain_order="left")
        start, stop = (bounds[name].fill_null(0).to_numpy() for name in ("start", "stop"))
        lengths = requests["item_id"].list.len().cast(pl.Int64).to_numpy()
        ends = events.height + np.cumsum(lengths)
        return Slices(np.maximum(start, stop - self._max_history), stop, ends - lengths, ends)


def _as_in_log(candidates: pl.DataFrame, log: Log, columns: LogColumns) -> pl.DataFrame:
    """Converts ids to int64 if the log's ids are whole numbers; an empty id becomes `UNKNOWN_ID`."""
    shown = {"user_id": columns.user, "item_id": columns.item}
    for name in [name for name, integer in log.integer_ids.items() if integer and name in candidates.columns]:
        nested = candidates.schema[name].is_nested()
        flat = candidates.select(PLACE, name)
        flat = flat.explode(name).drop_nulls() if nested else flat.filter(pl.col(name) != "")
        for place, text in flat.iter_rows() if not is_integer_text(flat[name]) else ():
            if not is_integer_text(pl.Series([text])):
                raise DataError(
                    f"{place}: {shown.get(name, name)} is {shortened(text)}, but every such id in the log is "
                    "a whole number such as 7; is it the right column?"
                )
        kind = pl.List(pl.Int64) if nested else pl.Int64
        numbers = candidates[name].cast(kind, strict=False)
        candidates = candidates.with_columns(numbers if nested else numbers.fill_null(UNKNOWN_ID))
    return candidates


def _last_of_items(log: Log, asked: pl.DataFrame, features: list[str]) -> pl.DataFrame:
    """Returns the items of `asked` that the log has, with the features of their last event."""
    parts = (log.part(number) for number in range(len(log.parts)))
    chosen = (events.join(asked, on="item_id", how="semi") for events in parts)
    return join_items([items_of(events, features) for events in chosen])


def _without_nulls(frame: pl.DataFrame, names: list[str], log: Log, columns: LogColumns) -> pl.DataFrame:
    """Replaces nulls, which are features of items and users without an event: ids become unknown, lists
    empty, numbers the value in `columns.fills`.

    Raises:
        DataError: `columns.fills` has no value for a number.
    """
    for name in names:
        unknown = frame.filter(pl.col(name).is_null())
        if not unknown.height:
            continue
        if name in columns.numbers:
            if name not in columns.fills:
                place = unknown[PLACE].explode()[0]
                raise DataError(
                    f"{place}: neither this file nor the log says what {name} is; add a column {name}, or "
                    f"--fill {name}=VALUE"
                )
            number = typed(
                pl.DataFrame({name: [columns.fills[name]]}), {name: NUMBER}, "--fill", 1, word="value"
            )
            value = pl.lit(number.item(), pl.Float32)
        elif name in columns.lists:
            value = pl.lit([], frame.schema[name])
        else:
            value = pl.lit(UNKNOWN_ID, pl.Int64) if log.integer_ids[name] else pl.lit("")
        frame = frame.with_columns(pl.col(name).fill_null(value))
    return frame
