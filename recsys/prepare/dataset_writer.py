"""Writes the files of a data set: rows as parquet, vocabularies, statistics and schema.json.

Rows come as slices of an event table (`rows`); their lists are cut one row group at a time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.errors import DataError
from recsys.prepare.rows import Slices, ranges

TRAIN, VALIDATION, TEST = "train", "validation", "test"

LATEST = "latest"
"""Name of the rows to predict on, with whole histories at the end of the log; they have no labels."""

SEQUENCE_SIDES = ("HISTORY", "CANDIDATE")
"""Sides of a feature that describes items, which events and candidates have."""


@dataclass(frozen=True)
class Feature:
    """A feature that the files hold, in one column per side.

    Attributes:
        name: name of the feature, without the prefix of a side.
        sides: some of "USER", "HISTORY", "CANDIDATE".
        number: True for a number, False for an id.
        multi_valued: each event or candidate has a list of ids.
    """

    name: str
    sides: tuple[str, ...]
    number: bool = False
    multi_valued: bool = False


@dataclass(frozen=True)
class Contents:
    """Describes what a data set holds besides `user_id`, `request_time` and timestamps.

    Attributes:
        task: "ranking" or "retrieval".
        features: inputs; features of HISTORY or CANDIDATE are columns of the events, features of USER are
            columns of the rows.
        labels: "binary" or "regression", by name; a label "x" is the column `label_x` of the events.
        actions: names of the bits 0, 1, ... of `actions`; None leaves a bit unused.
        watch_time: True if events have `watch_time`, in seconds.
    """

    task: str
    features: tuple[Feature, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    actions: tuple[str | None, ...] = ()
    watch_time: bool = False


def plain_table(frame: pl.DataFrame) -> pa.Table:
    """Converts a frame to arrow, with one chunk per column, and 32-bit offsets where polars has 64-bit
    ones."""

    def plain(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_large_list(kind):
            return pa.list_(plain(kind.value_type))
        return pa.string() if pa.types.is_large_string(kind) else kind

    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    return table.cast(pa.schema([(field.name, plain(field.type)) for field in table.schema])).combine_chunks()


class IdCounts:
    """Counts how often each id occurs in the training rows, and notes where it occurs first."""

    def __init__(self) -> None:
        self._frame: pl.DataFrame | None = None

    def add(self, values: pl.Series, order: pl.Series) -> None:
        """Counts values, or the elements of lists; `order` (int64) is the position of each value in the
        log."""
        counts = pl.DataFrame({"id": values, "first": order})
        if isinstance(values.dtype, pl.List):
            counts = counts.filter(pl.col("id").list.len() > 0).explode("id")
        counts = counts.group_by("id").agg(count=pl.len().cast(pl.Int64), first=pl.col("first").min())
        if self._frame is not None:
            counts = pl.concat([self._frame, counts.select(self._frame.columns)])
            counts = counts.group_by("id").agg(pl.col("count").sum(), pl.col("first").min())
        self._frame = counts

    def table(self, *, min_count: int, catalogue: pl.Series | None = None) -> pa.Table:
        """Lists ids by falling count, ties by first occurrence, followed by the rest of `catalogue`."""
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
        table = frame.select("id", "count").to_arrow()
        id_type = pa.string() if frame["id"].dtype == pl.String else pa.int64()
        return table.cast(pa.schema([("id", id_type), ("count", pa.int64())]))


class Moments:
    """Accumulates mean and standard deviation of a number x and of sign(x) log(1 + |x|)."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)

    def add(self, values: np.ndarray) -> None:
        """Adds values of x."""
        x = values.astype(np.float64)
        y = np.sign(x) * np.log1p(np.abs(x))
        self._sums += (len(x), x.sum(), (x * x).sum(), y.sum(), (y * y).sum())

    def summary(self) -> dict[str, float]:
        """Returns the four statistics; a deviation of 0 becomes 1, because it is used as a divisor."""
        count, x, xx, y, yy = self._sums.tolist()
        count = max(count, 1.0)
        deviation = [
            max(squares / count - (total / count) ** 2, 0.0) ** 0.5 or 1.0
            for total, squares in ((x, xx), (y, yy))
        ]
        return {
            "mean": x / count,
            "std": deviation[0],
            "log1p_mean": y / count,
            "log1p_std": deviation[1],
        }


class DatasetWriter:
    """Writes the files of one data set, and gathers statistics for vocabularies and schema.json."""

    def __init__(self, folder: Path, contents: Contents, *, rows_per_group: int):
        self.folder = folder
        self.contents = contents
        self.splits: dict[str, dict] = {}
        self.columns: dict[str, str] = {}
        self.counts = {f.name: IdCounts() for f in contents.features if not f.number}
        self.moments = {f.name: Moments() for f in contents.features if f.number}
        self._rows_per_group = rows_per_group

    def write(self, split: str, file: str, events: pa.Table, slices: Slices, rows: pa.Table) -> None:
        """Writes one parquet file of a split, and counts ids and numbers if it is the training split.

        Args:
            split: TRAIN, VALIDATION, TEST, LATEST, or the name of another split.
            file: relative path of the file.
            events: events sorted by user and time: `timestamps` (int64 seconds), `order` (int64, which breaks
                ties between ids), feature columns, `actions`, `watch_time`, `label_<name>`.
            slices: rows as slices of `events`.
            rows: columns of the rows: `user_id`, `request_time`, USER features; in the order of `slices`.
        """
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = self._event_columns(
            self.contents.task == "ranking" or split in (VALIDATION, TEST), self._labels(split)
        )
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

    def write_splits(
        self,
        split: np.ndarray,
        time: np.ndarray,
        events: pa.Table,
        slices: Slices,
        rows: pl.DataFrame,
        part: int | None = None,
    ) -> None:
        """Writes the rows of each split in the order of their times; ties keep the order of rows.

        Args:
            split: [rows], name of each row's split.
            time: [rows], time of each row.
            events: as for `write`.
            slices: as for `write`.
            rows: as for `write`.
            part: number of this part, if the data set has several; then empty files are left out.
        """
        for name in (TRAIN, VALIDATION, TEST):
            index = np.flatnonzero(split == name)
            index = index[np.argsort(time[index], kind="stable")]
            chosen = plain_table(rows[pl.Series(index)])
            if part is None:
                self.write(name, f"{name}.parquet", events, slices.take(index), chosen)
            elif len(index):
                self.write(name, f"{name}/part-{part:05d}.parquet", events, slices.take(index), chosen)

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
        """Writes schema.json with `about` (source, license, settings) and all statistics, and returns it."""
        features = []
        for feature in self.contents.features:
            kind = "number" if feature.number else "id"
            entry = {"name": feature.name, "sides": list(feature.sides), "kind": kind}
            if feature.number:
                entry["statistics"] = self.moments[feature.name].summary()
            else:
                entry |= {"multi_valued": feature.multi_valued, "vocabulary_size": sizes[feature.name]}
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

    def _labels(self, split: str) -> list[str]:
        return [] if split == LATEST else list(self.contents.labels)

    def _event_columns(self, with_candidates: bool, labels: list[str]) -> dict[str, tuple[str, str]]:
        """Maps each list column of the files to the column of events that it is cut from, and to its side."""
        columns = {}
        sides = ("HISTORY", "CANDIDATE") if with_candidates else ("HISTORY",)
        for side in sides:
            prefix = "uih_" if side == "HISTORY" else "candidate_"
            names = [feature.name for feature in self.contents.features if side in feature.sides]
            columns |= {prefix + name: (name, side) for name in [*names[:1], "timestamps", *names[1:]]}
            if side == "HISTORY" and self.contents.actions:
                columns["uih_actions"] = ("actions", side)
            if side == "HISTORY" and self.contents.watch_time:
                columns["uih_watch_time"] = ("watch_time", side)
            if side == "CANDIDATE":
                columns |= {f"candidate_{name}": (f"label_{name}", side) for name in labels}
        return columns

    def _note(self, split: str, file: str, slices: Slices, rows: pa.Table, events: pa.Table) -> None:
        """Adds the figures of one file to its split in schema.json."""
        figures = self.splits.setdefault(
            split, {"files": [], "rows": 0, "history_events": 0, "candidates": 0, "empty_histories": 0}
        )
        lengths = slices.history_end - slices.history_start
        figures["files"].append(file)
        figures["rows"] += len(rows)
        figures["history_events"] += int(lengths.sum())
        figures["candidates"] += int((slices.candidate_end - slices.candidate_start).sum())
        figures["empty_histories"] += int((lengths == 0).sum())
        if len(rows):
            times = pc.min_max(rows["request_time"]).as_py()
            figures["first_request_time"] = min(times["min"], figures.get("first_request_time", times["min"]))
            figures["last_request_time"] = max(times["max"], figures.get("last_request_time", times["max"]))
        for name in self._labels(split):
            chosen = ranges(slices.candidate_start, slices.candidate_end)
            values = events[f"label_{name}"].to_numpy()[chosen].astype(np.float64)
            sums = figures.setdefault("label_sums", {})
            sums[name] = sums.get(name, 0.0) + float(values.sum())
            if (values < 0).any() and name not in figures.setdefault("labels_below_0", []):
                figures["labels_below_0"].append(name)

    def _count(self, events: pa.Table, slices: Slices, rows: pa.Table) -> None:
        """Counts each training event once: in ranking as a candidate, because histories repeat candidates."""
        if self.contents.task == "ranking":
            chosen = ranges(slices.candidate_start, slices.candidate_end)
        else:
            chosen = ranges(slices.history_start, slices.history_end)
        order = events["order"].to_numpy()
        for feature in self.contents.features:
            if feature.sides == ("USER",):
                values, where = rows[feature.name], order[slices.candidate_start]
            else:
                values, where = events[feature.name].take(pa.array(chosen)), order[chosen]
            if feature.number:
                self.moments[feature.name].add(values.to_numpy())
            else:
                self.counts[feature.name].add(pl.Series(pl.from_arrow(values)), pl.Series(where))


def _ordered(frame: pl.DataFrame) -> pl.DataFrame:
    """Sorts ids by falling count, then by first occurrence; ids that share an event are sorted by value."""
    return frame.sort(["count", "first", "id"], descending=[True, False, False])


def _lists(values: pa.ChunkedArray, first: np.ndarray, last: np.ndarray) -> pa.Array:
    """Cuts values into lists: list i is values[first[i] : last[i]]."""
    offsets = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
    taken = values.take(pa.array(ranges(first, last))).combine_chunks()
    return pa.ListArray.from_arrays(pa.array(offsets), taken)
