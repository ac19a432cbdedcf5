"""Reads a log of any size for prepare_csv.py and cuts it by user into parts that fit into memory.

One pass over the input checks and converts every value and appends it to one of 256 bucket files, chosen by a
checksum of the user's id; a part is a run of neighbouring buckets. Ids stay text until the whole log has been
seen: only then is it known whether all of a column's ids are whole numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import DataError
from recsys.prepare import common
from recsys.prepare.sequences import sequence_pieces

NUM_BUCKETS = 256
HISTOGRAM_BINS = 1 << 20
MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}
LATEST = 253_402_300_800_000_000
"""The year 10000 in microseconds: a later time was given in another unit."""


@dataclass(frozen=True)
class LogColumns:
    """Which column of the log is what.

    Attributes:
        user, item, time: columns of each event.
        time_unit: "s", "ms", "us" since 1970, or "iso" for dates as text (UTC when they name no zone).
        delimiter: of text files; None: a comma, a tab for .tsv.
        ids: categories to keep under their names. numbers: numbers to keep.
        labels: name -> column. regression: names of labels that may be any number, the others are 0 or 1.
        actions: name of bit 0, 1, ... -> column that sets it where above 0.
        watch_time: column, or None. watch_time_scale: seconds of its unit.
        sequences: a line is a user with all items, see `prepare_sequences`. sequence_times: their times.
    """

    user: str
    item: str
    time: str
    time_unit: str = "s"
    delimiter: str | None = None
    ids: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    regression: frozenset[str] = frozenset()
    actions: Mapping[str, str] = field(default_factory=dict)
    watch_time: str | None = None
    watch_time_scale: float = 1.0
    sequences: bool = False
    sequence_times: Path | None = None

    def all(self) -> list[str]:
        """Every column to read, once."""
        watch = [self.watch_time] if self.watch_time else []
        found = [self.user, self.item, self.time, *self.ids, *self.numbers, *self.labels.values()]
        return list(dict.fromkeys([*found, *self.actions.values(), *watch]))


@dataclass
class Log:
    """A log cut by user; see `cut_log`.

    Attributes:
        files: what it was read from.
        num_rows: events of all parts.
        min_user_events: events of a user in what `part` gives, at least.
        items: column `id`, text: the items of events that `part` gives; None: all.
    """

    files: list[Path]
    num_rows: int
    parts: list[list[Path]]
    integer_ids: dict[str, bool]
    first_time: int
    last_time: int
    min_user_events: int = 1
    items: pl.DataFrame | None = None

    def part(self, number: int) -> pl.DataFrame:
        """Events of one part by user and time, ties in the order of the input.

        Columns: user_id, item_id (int64 or text), time_us, timestamps (s), order (row of the input), features
        under their names, label_<name>, actions, watch_time.
        """
        frame = self._kept(number)
        numbers = [name for name, integer in self.integer_ids.items() if integer]
        frame = frame.with_columns(
            *(pl.col(name).cast(pl.Int64) for name in numbers), timestamps=pl.col("time_us") // 1_000_000
        )
        return frame.sort("user_id", "time_us", "order")

    def keep_core(self, min_user_events: int, min_item_events: int) -> None:
        """Leaves out users and items with fewer events than these, again and again, until all have as many.

        Raises:
            DataError: nothing is left.
        """
        self.min_user_events = min_user_events
        while True:
            counts = pl.concat(
                self._kept(number).group_by(id="item_id").agg(count=pl.len())
                for number in range(len(self.parts))
            )
            counts = counts.group_by("id").agg(pl.col("count").sum())
            found = counts.filter(pl.col("count") >= min_item_events)
            self.num_rows = int(counts["count"].sum())
            self.items = found.select("id")
            if not found.height:
                raise DataError(
                    f"no item is left that has {min_item_events} events of users with {min_user_events}; "
                    "lower --min-item-events or --min-user-events"
                )
            if found.height == counts.height:
                return

    def _kept(self, number: int) -> pl.DataFrame:
        """Events of one part in the order of the input, with ids as text, less what `keep_core` left out."""
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
        """Moments (microseconds) before which these shares of events lie, to a millionth of the span."""
        width = (self.last_time - self.first_time) // HISTOGRAM_BINS + 1
        counts = np.zeros(HISTOGRAM_BINS + 1, dtype=np.int64)
        for path in (path for part in self.parts for path in part):
            for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
                bins = (batch["time_us"].to_numpy() - self.first_time) // width
                counts += np.bincount(bins, minlength=len(counts))
        places = np.searchsorted(np.cumsum(counts), np.array(shares) * self.num_rows, side="left") + 1
        return [self.first_time + int(place) * width for place in places]


class Piece(NamedTuple):
    """Some lines of one file, as text, and what errors call the file, its lines and the first of them.

    `lines` are those of the events where a line is not one event.
    """

    texts: pl.DataFrame
    where: str
    first: int
    word: str
    time_unit: str
    lines: np.ndarray | None = None


def cut_log(source: Path, columns: LogColumns, folder: Path, *, part_rows: int) -> Log:
    """Reads `source` (a file or a folder of files) once and writes its events into buckets below `folder`.

    Raises:
        DataError: no file, no column, a value that does not parse; with file and line.
    """
    files = [source] if columns.sequences else _files(source)
    integer_ids = dict.fromkeys(("user_id", "item_id", *columns.ids), True)
    rows = np.zeros(NUM_BUCKETS, dtype=np.int64)
    first_time, last_time = LATEST, 0
    with ExitStack() as stack:
        writers: dict[int, pa.RecordBatchStreamWriter] = {}
        for piece in (piece for path in files for piece in _pieces(path, columns)):
            events = _convert(piece, columns, int(rows.sum()))
            for name in integer_ids:
                integer_ids[name] = integer_ids[name] and common.is_integer_text(events[name])
            first_time = min(first_time, events["time_us"].min())
            last_time = max(last_time, events["time_us"].max())
            for bucket, table in _by_bucket(events):
                if bucket not in writers:
                    sink = stack.enter_context(pa.OSFile(str(_bucket_file(folder, bucket)), "wb"))
                    writers[bucket] = stack.enter_context(pa.ipc.new_stream(sink, table.schema))
                writers[bucket].write_table(table)
                rows[bucket] += len(table)
    if not rows.sum():
        raise DataError(f"{source}: no events")
    parts = [[_bucket_file(folder, bucket) for bucket in part] for part in _parts(rows, part_rows)]
    if columns.sequence_times:
        files = [*files, columns.sequence_times]
    return Log(files, int(rows.sum()), parts, integer_ids, first_time, last_time)


def _parts(rows: np.ndarray, part_rows: int) -> list[list[int]]:
    """Neighbouring buckets together, up to `part_rows` rows; a larger bucket is a part of its own."""
    parts: list[list[int]] = []
    room = 0
    for bucket in np.flatnonzero(rows).tolist():
        if not parts or rows[bucket] > room:
            parts.append([])
            room = part_rows
        parts[-1].append(bucket)
        room -= int(rows[bucket])
    return parts


def _bucket_file(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket:03d}.arrow"


def _by_bucket(events: pl.DataFrame) -> Iterator[tuple[int, pa.Table]]:
    """The events of each bucket, in their order; a user's bucket is the same on every machine."""
    users = events["user_id"].unique(maintain_order=True)
    buckets = pl.Series([crc32(user.encode()) % NUM_BUCKETS for user in users.to_list()], dtype=pl.Int64)
    chosen = events.join(pl.DataFrame({"user_id": users, "bucket": buckets}), on="user_id", how="left")
    chosen = chosen.sort("bucket", "order")
    starts = np.flatnonzero(np.diff(chosen["bucket"].to_numpy(), prepend=-1))
    table = chosen.drop("bucket").to_arrow(compat_level=pl.CompatLevel.oldest())
    for start, stop in zip(starts, [*starts[1:], len(table)], strict=True):
        yield chosen["bucket"][int(start)], table.slice(start, stop - start)


def _convert(piece: Piece, columns: LogColumns, offset: int) -> pl.DataFrame:
    """Events as `Log.part` gives them, with ids as text and without `timestamps`."""
    texts = piece.texts
    made = {
        "user_id": _present(piece, columns.user),
        "item_id": _present(piece, columns.item),
        "time_us": _microseconds(piece, columns.time),
        "order": pl.int_range(offset, offset + texts.height, eager=True),
        **{name: texts[name] for name in columns.ids},
        **{name: _numbers(piece, name).cast(pl.Float32) for name in columns.numbers},
    }
    for name, column in columns.labels.items():
        made[f"label_{name}"] = _label(piece, column, any_number=name in columns.regression)
    if columns.actions:
        bits = [(_numbers(piece, column) > 0).cast(pl.Int64) for column in columns.actions.values()]
        made["actions"] = sum((values * (1 << bit) for bit, values in enumerate(bits[1:], 1)), bits[0])
    if columns.watch_time:
        seconds = _numbers(piece, columns.watch_time) * columns.watch_time_scale
        _refuse(piece, columns.watch_time, seconds < 0, "a duration of at least 0")
        made["watch_time"] = seconds.cast(pl.Float32)
    return pl.DataFrame(made)


def _present(piece: Piece, name: str) -> pl.Series:
    column = piece.texts[name]
    _refuse(piece, name, column == "", "an id")
    return column


def _numbers(piece: Piece, name: str) -> pl.Series:
    """Float64; true and false are 1 and 0."""
    texts = piece.texts.select(pl.col(name).str.to_lowercase().replace({"true": "1", "false": "0"}))
    return common.typed(texts, {name: common.NUMBER}, piece.where, piece.first, word=piece.word)[name]


def _label(piece: Piece, column: str, *, any_number: bool) -> pl.Series:
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
        whole = texts.cast(pl.Int64, strict=False) * factor
        moments = whole.fill_null(
            (texts.cast(pl.Float64, strict=False) * factor).floor().cast(pl.Int64, strict=False)
        )
        expected = f"a time in {piece.time_unit} since 1970; set --time-unit to s, ms, us or iso"
    _refuse(piece, name, ~moments.is_between(0, LATEST - 1).fill_null(False), expected)
    return moments


def _iso(text: str) -> int | None:
    """Microseconds since 1970; one date at a time, for columns that mix forms."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def _refuse(piece: Piece, name: str, bad: pl.Series, expected: str) -> None:
    """Raises: DataError: some value is bad; names the first."""
    found = bad.arg_true()
    if len(found):
        value = piece.texts[name][found[0]]
        line = piece.first + found[0] if piece.lines is None else piece.lines[found[0]]
        where = f"{piece.where}, {piece.word} {line}"
        raise DataError(f"{where}: {name} is {value!r}, expected {expected}")


def _pieces(path: Path, columns: LogColumns) -> Iterator[Piece]:
    """A file's columns as text, some 100,000 lines at a time."""
    if columns.sequences:
        for texts, lines in sequence_pieces(path, columns.sequence_times):
            yield Piece(texts, str(path), 0, "line", columns.time_unit, lines)
        return
    if path.suffix != ".parquet":
        delimiter = columns.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
        for line, texts in common.text_batches(path, columns.all(), delimiter=delimiter):
            yield Piece(texts, str(path), line, "line", columns.time_unit)
        return
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        common.check_columns(columns.all(), file.schema_arrow.names, str(path))
        row = 0
        for batch in file.iter_batches(1 << 17, columns=columns.all()):
            frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))
            is_moment = frame[columns.time].dtype.is_temporal()
            yield Piece(
                _as_text(frame, path), str(path), row, "row", "us" if is_moment else columns.time_unit
            )
            row += frame.height
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _as_text(frame: pl.DataFrame, path: Path) -> pl.DataFrame:
    made = []
    for column in frame.get_columns():
        if column.dtype.is_nested() or column.dtype == pl.Binary:
            raise DataError(f"{path}: column {column.name} is {column.dtype}; a log has one value a cell")
        if column.dtype.is_temporal():
            column = column.cast(pl.Datetime("us")).dt.epoch("us")
        if column.dtype == pl.Boolean:
            column = column.cast(pl.Int8)
        made.append(column.cast(pl.String).fill_null(""))
    return pl.DataFrame(made)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder")
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
    found = sorted(path for path in source.iterdir() if path.is_file() and path.name.endswith(endings))
    if not found:
        raise DataError(f"{source}: no file that ends in {', '.join(endings)}")
    return found
