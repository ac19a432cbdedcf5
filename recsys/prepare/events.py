"""Cuts a log of any size by user into parts that fit into memory.

One pass over the input checks and converts every value and appends it to one of 256 bucket files, chosen by a
checksum of the user's id; a part is a run of neighboring buckets. Ids stay text until the whole log has been
seen: only then is it known whether all ids of a column are whole numbers.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zlib import crc32

import numpy as np
import polars as pl
import pyarrow as pa

from recsys.errors import DataError, shortened
from recsys.prepare.conditions import OPERATORS, Signal
from recsys.prepare.log_columns import MICROSECONDS, LogColumns, Piece
from recsys.prepare.text_tables import NUMBER, is_integer_text
from recsys.prepare.ties import FILE, SHUFFLE, TIE, shuffle_keys

NUM_BUCKETS = 256
HISTOGRAM_BINS = 1 << 20
END_OF_TIME = 253_402_300_800_000_000
"""Start of the year 10000 in microseconds since 1970; a later time must be in another unit."""


@dataclass
class Log:
    """A log cut by user; see `cut_log`.

    Attributes:
        num_rows: number of events in all parts.
        parts: bucket files of each part.
        integer_ids: by id column, True if all its ids are whole numbers.
        first_time, last_time: range of the events' times, in microseconds since 1970.
        min_user_events: users with fewer events are left out by `part`.
        items: the items that `part` keeps, as text in a column `id`; None keeps all.
        tie_type: type as which the column `TIE` is sorted; None without such a column.
    """

    num_rows: int
    parts: list[list[Path]]
    integer_ids: dict[str, bool]
    first_time: int
    last_time: int
    min_user_events: int = 1
    items: pl.DataFrame | None = None
    tie_type: pl.DataType | None = None

    def part(self, number: int) -> pl.DataFrame:
        """Reads the events of one part, ordered by user and time, with ties as `LogColumns.ties` says.

        Columns: user_id, item_id (int64 or text), time_us, timestamps (s), order (row of the input), features
        under their names, label_<name>, actions, watch_time.
        """
        frame = self._read(number)
        numbers = [name for name, integer in self.integer_ids.items() if integer]
        frame = frame.with_columns(
            *(
                pl.col(name).cast(pl.List(pl.Int64) if frame.schema[name].is_nested() else pl.Int64)
                for name in numbers
            ),
            timestamps=pl.col("time_us") // 1_000_000,
        )
        if self.tie_type is None:
            return frame.sort("user_id", "time_us", "order")
        frame = frame.with_columns(pl.col(TIE).cast(self.tie_type))
        return frame.sort("user_id", "time_us", TIE, "order").drop(TIE)

    def keep_core(self, min_user_events: int, min_item_events: int) -> None:
        """Leaves out users and items with too few events, again and again, until all others have enough.

        Raises:
            DataError: no event is left.
        """
        self.min_user_events = min_user_events
        while True:
            counts = pl.concat(
                self._read(number).group_by(id="item_id").agg(count=pl.len())
                for number in range(len(self.parts))
            )
            counts = counts.group_by("id").agg(pl.col("count").sum())
            frequent = counts.filter(pl.col("count") >= min_item_events)
            self.num_rows = int(counts["count"].sum())
            self.items = frequent.select("id")
            if not frequent.height:
                raise DataError(
                    f"no item is left that has {min_item_events} events of users with {min_user_events}; "
                    "lower --min-item-events or --min-user-events"
                )
            if frequent.height == counts.height:
                return

    def _read(self, number: int) -> pl.DataFrame:
        """Reads one part in the order of the input, with ids as text, except what `keep_core` left out."""
        tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in self.parts[number]]
        frame = pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))
        if self.items is not None:
            frame = frame.join(
                self.items, left_on="item_id", right_on="id", how="semi", maintain_order="left"
            )
        if self.min_user_events > 1:
            frame = frame.filter(pl.len().over("user_id") >= self.min_user_events)
        return frame

    def time_quantiles(self, *shares: float) -> list[int]:
        """Returns the times, in microseconds, before which the given shares of events lie, to a millionth of
        the log's span."""
        width = (self.last_time - self.first_time) // HISTOGRAM_BINS + 1
        counts = np.zeros(HISTOGRAM_BINS + 1, dtype=np.int64)
        for path in (path for part in self.parts for path in part):
            for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
                bins = (batch["time_us"].to_numpy() - self.first_time) // width
                counts += np.bincount(bins, minlength=len(counts))
        places = np.searchsorted(np.cumsum(counts), np.array(shares) * self.num_rows, side="left") + 1
        return [self.first_time + int(place) * width for place in places]


def cut_log(pieces: Iterator[Piece], columns: LogColumns, folder: Path, *, part_rows: int) -> Log:
    """Reads the pieces of a log once and writes their events into buckets below `folder`.

    Args:
        pieces: the events.
        columns: meaning of the columns of the pieces.
        folder: folder of the bucket files.
        part_rows: most events in a part, unless a single bucket has more.

    Raises:
        DataError: a value cannot be parsed; names file and line.
    """
    integer_ids = dict.fromkeys(("user_id", "item_id", *columns.ids, *columns.lists), True)
    rows = np.zeros(NUM_BUCKETS, dtype=np.int64)
    first_time, last_time = END_OF_TIME, 0
    tie_types = [pl.Int64(), pl.Float64(), pl.String()] if columns.ties != FILE else [None]
    if columns.ties == SHUFFLE:
        tie_types = [pl.UInt64()]
    with ExitStack() as stack:
        writers: dict[int, pa.RecordBatchStreamWriter] = {}
        for piece in pieces:
            events = _convert(piece, columns, int(rows.sum()))
            for name in integer_ids:
                integer_ids[name] = integer_ids[name] and is_integer_text(
                    events[name].explode(empty_as_null=False) if name in columns.lists else events[name]
                )
            while len(tie_types) > 1 and events[TIE].cast(tie_types[0], strict=False).null_count():
                del tie_types[0]
            first_time = min(first_time, events["time_us"].min())
            last_time = max(last_time, events["time_us"].max())
            for bucket, table in _by_bucket(events):
                if bucket not in writers:
                    sink = stack.enter_context(pa.OSFile(str(_bucket_file(folder, bucket)), "wb"))
                    writers[bucket] = stack.enter_context(pa.ipc.new_stream(sink, table.schema))
                writers[bucket].write_table(table)
                rows[bucket] += len(table)
    parts = [[_bucket_file(folder, bucket) for bucket in part] for part in _parts(rows, part_rows)]
    return Log(int(rows.sum()), parts, integer_ids, first_time, last_time, tie_type=tie_types[0])


def _parts(rows: np.ndarray, part_rows: int) -> list[list[int]]:
    """Groups neighboring buckets up to `part_rows` rows; a larger bucket is a part by itself."""
    parts: list[list[int]] = []
    rows_left = 0
    for bucket in np.flatnonzero(rows).tolist():
        if not parts or rows[bucket] > rows_left:
            parts.append([])
            rows_left = part_rows
        parts[-1].append(bucket)
        rows_left -= int(rows[bucket])
    return parts


def _bucket_file(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket:03d}.arrow"


def _by_bucket(events: pl.DataFrame) -> Iterator[tuple[int, pa.Table]]:
    """Yields the events of each bucket, in their order; a user's bucket is the same on every machine."""
    users = events["user_id"].unique(maintain_order=True)
    buckets = pl.Series([crc32(user.encode()) % NUM_BUCKETS for user in users.to_list()], dtype=pl.Int64)
    chosen = events["user_id"].replace_strict(users, buckets, return_dtype=pl.Int64).to_numpy()
    order = np.argsort(chosen, kind="stable")
    chosen = chosen[order]
    starts = np.flatnonzero(np.diff(chosen, prepend=-1))
    table = events[pl.Series(order)].to_arrow(compat_level=pl.CompatLevel.oldest())
    for start, stop in zip(starts, [*starts[1:], len(table)], strict=True):
        yield int(chosen[start]), table.slice(start, stop - start)


def _convert(piece: Piece, columns: LogColumns, offset: int) -> pl.DataFrame:
    """Converts a piece to the columns of `Log.part`, with ids as text and without `timestamps`."""
    piece = _filled(piece, columns)
    texts = piece.texts
    events = {
        **convert_features(piece, columns),
        "time_us": _microseconds(piece, columns.time),
        "order": pl.int_range(offset, offset + texts.height, eager=True),
    }
    if columns.ties == SHUFFLE:
        events[TIE] = shuffle_keys(events["order"].to_numpy(), columns.seed)
    elif columns.ties != FILE:
        events[TIE] = texts[columns.ties]
    for name, signal in columns.labels.items():
        events[f"label_{name}"] = _label(piece, signal, any_number=name in columns.regression)
    if columns.actions:
        signals = [s if s.sign else s._replace(sign=">", value="0") for s in columns.actions.values()]
        bits = [_is_set(piece, signal) for signal in signals]
        events["actions"] = sum((values * (1 << bit) for bit, values in enumerate(bits[1:], 1)), bits[0])
    if columns.watch_time:
        seconds = _numbers(piece, columns.watch_time) * columns.watch_time_scale
        _refuse(piece, columns.watch_time, seconds < 0, "a duration of at least 0")
        events["watch_time"] = seconds.cast(pl.Float32)
    return pl.DataFrame(events)


def convert_features(piece: Piece, columns: LogColumns) -> dict[str, pl.Series]:
    """Converts users, items and the features that a piece has; ids stay text, and lists are split.

    Raises:
        DataError: a user or item is empty, or a number is not a number; names file and line.
    """
    piece = _filled(piece, columns)
    texts = piece.texts
    return {
        "user_id": _present(piece, columns.user),
        "item_id": _present(piece, columns.item),
        **{name: texts[name] for name in columns.ids if name in texts.columns},
        **{
            name: _lists(texts[name], columns.list_delimiter)
            for name in columns.lists
            if name in texts.columns
        },
        **{name: _numbers(piece, name).cast(pl.Float32) for name in columns.numbers if name in texts.columns},
    }


def _filled(piece: Piece, columns: LogColumns) -> Piece:
    """Replaces empty cells by the values of `columns.fills`."""
    fills = {name: fill for name, fill in columns.fills.items() if name in piece.texts.columns}
    return piece._replace(
        texts=piece.texts.with_columns(pl.col(name).replace("", fill) for name, fill in fills.items())
    )


def _present(piece: Piece, name: str) -> pl.Series:
    column = piece.texts[name]
    _refuse(piece, name, column == "", "an id")
    return column


def _numbers(piece: Piece, name: str) -> pl.Series:
    """Parses a column to float64; true and false are 1 and 0."""
    texts = piece.texts[name].str.strip_chars().str.to_lowercase().replace({"true": "1", "false": "0"})
    numbers = texts.cast(pl.Float64, strict=False)
    _refuse(piece, name, ~numbers.is_finite().fill_null(False), NUMBER)
    return numbers


def _lists(texts: pl.Series, delimiter: str) -> pl.Series:
    """Splits cells into lists of categories, without surrounding blanks and without empty categories."""
    stripped = pl.element().str.strip_chars()
    return texts.str.split(delimiter).list.eval(stripped.filter(stripped != ""))


def _is_set(piece: Piece, signal: Signal) -> pl.Series:
    """Returns 1 for events for which the condition of a signal holds, else 0; int64."""
    compare = OPERATORS[signal.sign]
    if signal.number is None:
        return compare(piece.texts[signal.column], signal.value).cast(pl.Int64)
    return compare(_numbers(piece, signal.column), signal.number).cast(pl.Int64)


def _label(piece: Piece, signal: Signal, *, any_number: bool) -> pl.Series:
    if signal.sign:
        return _is_set(piece, signal).cast(pl.Float32)
    column = signal.column
    values = _numbers(piece, column)
    if not any_number:
        _refuse(
            piece,
            column,
            ~values.is_in([0.0, 1.0]),
            "0 or 1 (--label NAME=COLUMN:regression takes any number)",
        )
    return values.cast(pl.Float32)


def _microseconds(piece: Piece, name: str) -> pl.Series:
    texts = piece.texts[name].str.strip_chars()
    if piece.time_unit == "iso":
        moments = texts.str.to_datetime(time_unit="us", time_zone="UTC", strict=False).dt.epoch("us")
        if moments.null_count():
            parsed = pl.Series(
                [_iso(text) for text in texts.filter(moments.is_null()).to_list()], dtype=pl.Int64
            )
            moments = moments.scatter(moments.is_null().arg_true(), parsed)
        expected = "a date such as 2024-05-31 or 2024-05-31T12:30:00+02:00"
    else:
        factor = MICROSECONDS[piece.time_unit]
        microseconds = texts.cast(pl.Int64, strict=False) * factor
        moments = microseconds.fill_null(
            (texts.cast(pl.Float64, strict=False) * factor).floor().cast(pl.Int64, strict=False)
        )
        expected = f"a time in {piece.time_unit} since 1970; set --time-unit to s, ms, us or iso"
    _refuse(piece, name, ~moments.is_between(0, END_OF_TIME - 1).fill_null(False), expected)
    return moments


def _iso(text: str) -> int | None:
    """Parses one date to microseconds since 1970, for columns with mixed formats; returns None otherwise."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def _refuse(piece: Piece, name: str, bad: pl.Series, expected: str) -> None:
    """Raises a DataError about the first bad value, if there is one."""
    places = bad.arg_true()
    if len(places):
        value = piece.texts[name][places[0]]
        line = piece.first + places[0] if piece.lines is None else piece.lines[places[0]]
        where = f"{piece.where}, {piece.word} {line}"
        remedy = "" if value and value.strip() else f"; --fill {name}=VALUE says what an empty cell counts as"
        raise DataError(f"{where}: {name} is {shortened(value)}, expected {expected}{remedy}")
