"""From events sorted by user and time to rows on disk: requests, histories, vocabularies, statistics.

A history is a run of a user's events and so are the candidates of a request, hence a row is two slices of
one event table, and lists are cut from it a row group at a time: memory does not grow with histories.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.errors import DataError

TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Feature:
    """An input as the files hold it.

    Attributes:
        name: without the side's prefix.
        sides: some of "USER", "HISTORY", "CANDIDATE".
        number: a number; else an id.
        multi_valued: a list of ids an event or candidate.
    """

    name: str
    sides: tuple[str, ...]
    number: bool = False
    multi_valued: bool = False


@dataclass(frozen=True)
class Contents:
    """What a data set holds besides `user_id`, `request_time` and timestamps.

    Attributes:
        task: "ranking" or "retrieval".
        features: inputs; those of HISTORY or CANDIDATE are columns of the events, those of USER of the rows.
        labels: name -> "binary" or "regression"; a label "x" is the column `label_x` of the events.
        actions: names of the bits 0, 1, ... of `actions`; None leaves a bit unused.
        watch_time: whether events have `watch_time` in seconds.
    """

    task: str
    features: tuple[Feature, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    actions: tuple[str | None, ...] = ()
    watch_time: bool = False


class Slices(NamedTuple):
    """Rows: events [history_start, history_end) a history, [candidate_start, candidate_end) candidates."""

    history_start: np.ndarray
    history_end: np.ndarray
    candidate_start: np.ndarray
    candidate_end: np.ndarray

    def take(self, index: np.ndarray) -> "Slices":
        return Slices(*(part[index] for part in self))


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """For each element the index at which its run of equal values (in all columns at once) starts; int64."""
    index = np.arange(len(columns[0]), dtype=np.int64)
    new = np.zeros(len(index), dtype=bool)
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.maximum.accumulate(np.where(new, index, 0)) if len(index) else index


def request_slices(
    user: np.ndarray,
    time: np.ndarray,
    *,
    gap: int,
    max_candidates: int,
    max_history: int,
    apart: tuple[np.ndarray, ...] = (),
) -> Slices:
    """Requests of a log: one user's neighbouring events, each at most `gap` behind the one before it.

    The history of a request is what the user did strictly before its first event.

    Args:
        user: [n] user of each event; a user's events stand together, ordered by time.
        time: [n] int64, in the unit of `gap`.
        gap: longest pause within a request.
        max_candidates: longer requests are cut into several.
        max_history: newest events that a history keeps.
        apart: [n] columns that are constant within a request, such as the place in the app or the split.
    """
    count = len(user)
    session = run_starts(user, *apart)
    index = np.arange(count, dtype=np.int64)
    pause = np.zeros(count, dtype=bool)
    pause[1:] = np.diff(time) > gap
    session = np.maximum.accumulate(np.where((session == index) | pause, index, 0)) if count else index
    start = np.flatnonzero((index - session) % max_candidates == 0)
    end = np.append(start[1:], count)[: len(start)]
    history_end = run_starts(user, time)[start]
    history_start = np.maximum(run_starts(user)[start], history_end - max_history)
    return Slices(history_start, history_end, start, end)


def freeze_histories(
    slices: Slices, user: np.ndarray, period: np.ndarray, frozen: np.ndarray, *, max_history: int
) -> Slices:
    """Ends the history of requests in `frozen` periods where the period begins for their user.

    Metrics within users need this. Where a user has one positive and one negative, a history that already
    shows the first outcome speaks against the second: the better a model reads it, the lower its GAUC.

    Args:
        slices: requests.
        user: [n] user of each event.
        period: [n] period of each event, rising in time; no request reaches over its end.
        frozen: [n] bool, the same for all events of a period.
        max_history: newest events that a history keeps.
    """
    start = slices.candidate_start
    known = run_starts(user, period)[start]
    end = np.where(frozen[start], np.minimum(slices.history_end, known), slices.history_end)
    return slices._replace(
        history_start=np.maximum(run_starts(user)[start], end - max_history), history_end=end
    )


def holdout_slices(
    user: np.ndarray, *, held_out: int, with_candidate: bool, max_history: int | None
) -> Slices:
    """Leave-one-out rows, one a user: all but the last `held_out` events, and the next one as candidate.

    A user with fewer than 3 events has nothing held out: all of them are training history, and there is no
    row with a candidate.
    """
    index = np.arange(len(user), dtype=np.int64)
    first = np.flatnonzero(run_starts(user) == index)
    last = np.append(first[1:], len(user)) if len(first) else first
    whole = last - first >= 3
    if with_candidate:
        first, last = first[whole], last[whole]
        end = last - held_out
        candidate_end = end + 1
    else:
        end = np.where(whole, last - held_out, last)
        candidate_end = end
    start = first if max_history is None else np.maximum(first, end - max_history)
    return Slices(start, end, end, candidate_end)


def plain_table(frame: pl.DataFrame) -> pa.Table:
    """A frame in arrow, one chunk a column, with 32-bit offsets where polars has 64-bit ones."""

    def plain(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_large_list(kind):
            return pa.list_(plain(kind.value_type))
        return pa.string() if pa.types.is_large_string(kind) else kind

    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    return table.cast(pa.schema([(one.name, plain(one.type)) for one in table.schema])).combine_chunks()


class IdCounts:
    """How often each id occurs in the training rows, and where first."""

    def __init__(self) -> None:
        self._frame: pl.DataFrame | None = None

    def add(self, values: pl.Series, order: pl.Series) -> None:
        """Counts values (lists are opened); `order` (int64) says which stands before which."""
        found = pl.DataFrame({"id": values, "first": order})
        if isinstance(values.dtype, pl.List):
            found = found.filter(pl.col("id").list.len() > 0).explode("id")
        found = found.group_by("id").agg(count=pl.len().cast(pl.Int64), first=pl.col("first").min())
        if self._frame is not None:
            found = pl.concat([self._frame, found.select(self._frame.columns)])
            found = found.group_by("id").agg(pl.col("count").sum(), pl.col("first").min())
        self._frame = found

    def table(self, *, min_count: int, catalogue: pl.Series | None = None) -> pa.Table:
        """Ids by falling count, ties by first occurrence; all those of `catalogue` too, counted or not."""
        frame = self._frame if self._frame is not None else pl.DataFrame({"id": [], "count": [], "first": []})
        if frame["id"].dtype == pl.String:
            frame = frame.filter(pl.col("id") != "")
        if catalogue is not None:
            more = pl.DataFrame({"id": catalogue}).unique(maintain_order=True)
            more = more.join(frame.select("id"), on="id", how="anti", maintain_order="left")
            more = more.with_columns(count=pl.lit(0, pl.Int64), first=pl.int_range(pl.len()))
            counted = _ordered(frame)
            frame = pl.concat([counted, more.select(frame.columns)], how="vertical_relaxed")
        else:
            frame = _ordered(frame.filter(pl.col("count") >= min_count))
        made = frame.select("id", "count").to_arrow()
        id_type = pa.string() if frame["id"].dtype == pl.String else pa.int64()
        return made.cast(pa.schema([("id", id_type), ("count", pa.int64())]))


class Moments:
    """Mean and standard deviation of a number x and of sign(x) log(1 + |x|) over what was added."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)

    def add(self, values: np.ndarray) -> None:
        x = values.astype(np.float64)
        y = np.sign(x) * np.log1p(np.abs(x))
        self._sums += (len(x), x.sum(), (x * x).sum(), y.sum(), (y * y).sum())

    def summary(self) -> dict[str, float]:
        count, x, xx, y, yy = self._sums.tolist()
        count = max(count, 1.0)
        deviation = [
            max(two / count - (one / count) ** 2, 0.0) ** 0.5 or 1.0 for one, two in ((x, xx), (y, yy))
        ]
        return {
            "mean": x / count,
            "std": deviation[0],
            "log1p_mean": y / count,
            "log1p_std": deviation[1],
        }


class DatasetWriter:
    """Writes the files of one data set into `folder` and gathers what vocabularies and schema.json need."""

    def __init__(self, folder: Path, contents: Contents, *, rows_per_group: int):
        self.folder = folder
        self.contents = contents
        self.splits: dict[str, dict] = {}
        self.columns: dict[str, str] = {}
        self.counts = {f.name: IdCounts() for f in contents.features if not f.number}
        self.moments = {f.name: Moments() for f in contents.features if f.number}
        self._rows_per_group = rows_per_group

    def write(self, split: str, file: str, events: pa.Table, slices: Slices, rows: pa.Table) -> None:
        """Writes one parquet file of a split, and counts ids and numbers when it is the training split.

        Args:
            split: TRAIN, VALIDATION, TEST or another name, which is only written.
            file: relative path of the file.
            events: events sorted by user and time: `timestamps` (int64 s), `order` (int64, ties between ids
                go by it), feature columns, `actions`, `watch_time`, `label_<name>`.
            slices: rows as slices of `events`.
            rows: columns of the rows: `user_id`, `request_time`, USER features; in the order of `slices`.
        """
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = self._event_columns(self.contents.task == "ranking" or split in (VALIDATION, TEST))
        writer = None
        for start in range(0, max(len(rows), 1), self._rows_per_group):
            index = np.arange(start, min(start + self._rows_per_group, len(rows)))
            table = rows.slice(start, len(index))
            part = slices.take(index)
            for name, (source, side) in columns.items():
                first, last = part[:2] if side == "HISTORY" else part[2:]
                table = table.append_column(name, _lists(events[source], first, last))
            if writer is None:
                writer = pq.ParquetWriter(
                    path, table.schema, compression="zstd", compression_level=3, write_page_checksum=True
                )
            writer.write_table(table, row_group_size=self._rows_per_group)
        writer.close()
        self.columns = {**self.columns, **{f.name: str(f.type) for f in writer.schema}}
        self._note(split, file, slices, rows, events)
        if split == TRAIN:
            self._count(events, slices, rows)

    def write_vocabularies(
        self, *, min_count: int, catalogue: Mapping[str, pl.Series] | None = None
    ) -> dict[str, int]:
        """Writes `vocabulary/<feature>.parquet` for each id feature and returns the number of ids of each.

        Raises:
            DataError: no id of a feature occurs `min_count` times in the training rows.
        """
        sizes = {}
        (self.folder / "vocabulary").mkdir(exist_ok=True)
        for name, counts in self.counts.items():
            table = counts.table(min_count=min_count, catalogue=(catalogue or {}).get(name))
            if not len(table):
                raise DataError(f"no {name} occurs {min_count} times in the training rows; lower --min-count")
            path = self.folder / "vocabulary" / f"{name}.parquet"
            pq.write_table(table, path, compression="zstd", write_page_checksum=True)
            sizes[name] = len(table)
        return sizes

    def write_schema(self, about: dict, sizes: Mapping[str, int]) -> dict:
        """Writes schema.json: `about` (source, licence, settings) and everything gathered; returns it."""
        features = []
        for one in self.contents.features:
            entry = {"name": one.name, "sides": list(one.sides), "kind": "number" if one.number else "id"}
            if one.number:
                entry["statistics"] = self.moments[one.name].summary()
            else:
                entry |= {"multi_valued": one.multi_valued, "vocabulary_size": sizes[one.name]}
            features.append(entry)
        schema = {
            **about,
            "task": self.contents.task,
            "features": features,
            "labels": dict(self.contents.labels),
            "actions": [
                {"name": name, "bit": bit}
                for bit, name in enumerate(self.contents.actions)
                if name is not None
            ],
            "watch_time": self.contents.watch_time,
            "columns": self.columns,
            "splits": self.splits,
        }
        (self.folder / "schema.json").write_text(
            json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return schema

    def _event_columns(self, with_candidates: bool) -> dict[str, tuple[str, str]]:
        """Column in the file -> column of the events and side."""
        columns = {}
        sides = ("HISTORY", "CANDIDATE") if with_candidates else ("HISTORY",)
        for side in sides:
            prefix = "uih_" if side == "HISTORY" else "candidate_"
            names = [one.name for one in self.contents.features if side in one.sides]
            columns |= {prefix + name: (name, side) for name in [*names[:1], "timestamps", *names[1:]]}
            if side == "HISTORY" and self.contents.actions:
                columns["uih_actions"] = ("actions", side)
            if side == "HISTORY" and self.contents.watch_time:
                columns["uih_watch_time"] = ("watch_time", side)
            if side == "CANDIDATE":
                columns |= {f"candidate_{name}": (f"label_{name}", side) for name in self.contents.labels}
        return columns

    def _note(self, split: str, file: str, slices: Slices, rows: pa.Table, events: pa.Table) -> None:
        """Adds one file to the figures of its split."""
        noted = self.splits.setdefault(
            split, {"files": [], "rows": 0, "history_events": 0, "candidates": 0, "empty_histories": 0}
        )
        lengths = slices.history_end - slices.history_start
        noted["files"].append(file)
        noted["rows"] += len(rows)
        noted["history_events"] += int(lengths.sum())
        noted["candidates"] += int((slices.candidate_end - slices.candidate_start).sum())
        noted["empty_histories"] += int((lengths == 0).sum())
        if len(rows):
            times = pc.min_max(rows["request_time"]).as_py()
            noted["first_request_time"] = min(times["min"], noted.get("first_request_time", times["min"]))
            noted["last_request_time"] = max(times["max"], noted.get("last_request_time", times["max"]))
        for name in self.contents.labels:
            chosen = _ranges(slices.candidate_start, slices.candidate_end)
            values = events[f"label_{name}"].to_numpy()[chosen].astype(np.float64)
            sums = noted.setdefault("label_sums", {})
            sums[name] = sums.get(name, 0.0) + float(values.sum())
            if (values < 0).any() and name not in noted.setdefault("labels_below_0", []):
                noted["labels_below_0"].append(name)

    def _count(self, events: pa.Table, slices: Slices, rows: pa.Table) -> None:
        """Counts each training event once: as a candidate in ranking, where histories repeat them."""
        if self.contents.task == "ranking":
            chosen = _ranges(slices.candidate_start, slices.candidate_end)
        else:
            chosen = _ranges(slices.history_start, slices.history_end)
        order = events["order"].to_numpy()
        for one in self.contents.features:
            if one.sides == ("USER",):
                values, where = rows[one.name], order[slices.candidate_start]
            else:
                values, where = events[one.name].take(pa.array(chosen)), order[chosen]
            if one.number:
                self.moments[one.name].add(values.to_numpy())
            else:
                self.counts[one.name].add(pl.Series(pl.from_arrow(values)), pl.Series(where))


def _ordered(frame: pl.DataFrame) -> pl.DataFrame:
    """By falling count, then first occurrence; ids of one event stand in their own order."""
    return frame.sort(["count", "first", "id"], descending=[True, False, False])


def _lists(values: pa.ChunkedArray, first: np.ndarray, last: np.ndarray) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
    taken = values.take(pa.array(_ranges(first, last))).combine_chunks()
    return pa.ListArray.from_arrays(pa.array(offsets), taken)


def _ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The numbers of [first[0], last[0]), then of [first[1], last[1]), ...; int64."""
    lengths = last - first
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(first - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
