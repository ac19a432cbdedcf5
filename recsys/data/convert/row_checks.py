"""Checks that rows keep their contract, over all rows of a table at once.

Each check adds the rows that break it to `RowFindings`, with a reason, by which they are counted, and a
sentence, which is written for the first one only unless all are asked for. `schema.contract` checks the
columns and types of a whole file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config.checks import loss_kind
from recsys.data.arrow import floats, integers, is_text, one_array
from recsys.data.convert.column_block import counts_of
from recsys.data.schema.contract import FileColumn, Kind
from recsys.data.schema.row_keys import hash_keys, same_key
from recsys.errors import DataError

REASONS = (
    "null",
    "ragged",
    "not_finite",
    "negative",
    "too_large",
    "unsorted",
    "future_event",
    "label",
    "too_many_candidates",
    "duplicate_key",
)
"""Names under which bad rows are counted."""

_LATEST_TIME = 100_000_000_000
"""Latest time in seconds since 1970 (year 5138). Times in milliseconds are larger since 1973."""


class RowFindings:
    """The bad rows of one table, each with the first reason that was found for it.

    Args:
        num_rows: number of rows of the table.
        describe_all: whether to keep a sentence for every bad row, not only for the first one.
    """

    def __init__(self, num_rows: int, *, describe_all: bool = False) -> None:
        self.codes = np.zeros(num_rows, np.int8)
        """0 for a good row, else 1 + index into REASONS."""
        self.sentences: dict[int, str] = {}
        """The sentence of every bad row, by row number, if `describe_all`."""
        self._describe_all = describe_all
        self._first: tuple[int, str] | None = None

    def add(self, reason: str, rows: np.ndarray, sentence: Callable[[int], str]) -> None:
        """Notes bad rows.

        Args:
            reason: one of REASONS.
            rows: row numbers within the table, ascending; may repeat.
            sentence: called with an index into `rows`; describes the fault of that row.
        """
        if len(rows) == 0:
            return
        is_fresh = self.codes[rows] == 0
        self.codes[rows[is_fresh]] = 1 + REASONS.index(reason)
        if self._describe_all:
            new_rows, places = np.unique(rows[is_fresh], return_index=True)
            for row, place in zip(new_rows.tolist(), np.flatnonzero(is_fresh)[places].tolist(), strict=True):
                self.sentences[row] = sentence(place)
        if self._first is None or rows[0] < self._first[0]:
            self._first = (int(rows[0]), sentence(0))

    def raise_first(self, file: str, first_row: int, *, skippable: bool = True) -> None:
        """Raises a DataError about the first bad row, if there is one.

        Args:
            file: name of the file in the error.
            first_row: row of the file at which the table begins, counted from 0.
            skippable: True if `data.bad_rows` could leave such rows out.
        """
        if self._first is None:
            return
        row, sentence = self._first
        more = int(np.count_nonzero(self.codes)) - 1
        count = f" ({more} more bad row{'s' * (more > 1)} in this row group.)" if more else ""
        or_skip = ", or leave such rows out and count them: data.bad_rows { policy: SKIP }"
        remedy = f"Correct the file{or_skip if skippable else ''}."
        raise DataError(f"{file}, row {first_row + row}: {sentence}{count} {remedy}")


@dataclass(frozen=True)
class Lists:
    """A column of lists: row i has values[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray
    values: pa.Array

    @classmethod
    def of(cls, column: pa.Array) -> "Lists":
        """Takes a list array apart without copying; a null list (see `check_nulls`) becomes empty."""
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.large_list(column.type.value_type))
        if column.null_count:
            column = pc.fill_null(column, pa.scalar([], column.type))
        offsets, values = column.offsets.to_numpy().astype(np.int64), column.values
        first, last = int(offsets[0]), int(offsets[-1])
        if first or last != len(values):
            offsets, values = offsets - first, values.slice(first, last - first)
        return cls(offsets, values)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of values of each row, int64 [rows]."""
        return counts_of(self.offsets)

    def rows_of(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows of the values at the flat indices `places`."""
        return np.searchsorted(self.offsets, places, side="right") - 1


class ColumnValues:
    """The values of one column with the row of each, for checks and their sentences."""

    def __init__(self, column: FileColumn, lists: tuple[Lists, ...], values: pa.Array) -> None:
        self.column = column
        self.lists = lists
        self.values = values

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows of the table for flat indices of the innermost values."""
        for level in reversed(self.lists):
            places = level.rows_of(places)
        return places

    def name(self, place: int) -> str:
        """Names a value by its column and its index in the row's lists: `uih_item_id[3]`."""
        index = ""
        for level in reversed(self.lists):
            row = int(level.rows_of(np.asarray([place]))[0])
            index = f"[{place - int(level.offsets[row])}]{index}"
            place = row
        return self.column.name + index

    def report(self, findings: RowFindings, reason: str, places: np.ndarray, template: str) -> None:
        """Adds the rows of the flat indices `places` to the findings; `template`, a sentence, may contain
        {value}."""

        def sentence(i: int) -> str:
            place = int(places[i])
            return f"{self.name(place)} {template.format(value=self.values[place].as_py())}."

        if len(places):
            findings.add(reason, self.rows(places), sentence)


def check_nulls(findings: RowFindings, cells: ColumnValues, array: pa.Array) -> None:
    """Reports nulls in place of a whole list, or of a plain value that must not be null."""
    column = cells.column
    if array.null_count and (column.depth or not column.nullable):
        hint = ". An empty list is written [], not null" if column.depth else column.null_remedy
        findings.add("null", _true(pc.is_null(array)), lambda i: f"{column.name} is null{hint}.")
    if column.depth == 2 and cells.lists[0].values.null_count:
        outer = cells.lists[0]
        rows = outer.rows_of(_true(pc.is_null(outer.values)))
        findings.add(
            "null", rows, lambda i: f"{column.name} has a null list in it. An empty list is written []."
        )


def check_values(findings: RowFindings, cells: ColumnValues) -> None:
    """Reports nulls inside lists, wrong signs, values out of range and NaN, by the column's kind."""
    values, column = cells.values, cells.column
    if values.null_count and cells.lists and not column.nullable:
        cells.report(findings, "null", _true(pc.is_null(values)), f"is null{column.null_remedy}")
    if pa.types.is_floating(values.type):
        _check_floats(findings, cells)
    check_meaning(findings, cells)


def check_meaning(findings: RowFindings, cells: ColumnValues) -> None:
    """Reports values that a column of this kind cannot have: signs, ranges, labels outside their set."""
    if cells.column.kind is Kind.LABEL:
        check_label(findings, cells)
    elif not cells.column.signed and not is_text(cells.values.type):
        _check_range(findings, cells)


def check_label(findings: RowFindings, cells: ColumnValues) -> None:
    """Reports labels that the loss of their task cannot take."""
    loss, numbers = cells.column.task.loss, floats(cells.values)
    if loss_kind(loss) == "binary":
        bad = np.flatnonzero((numbers != 0) & (numbers != 1) & np.isfinite(numbers))
        cells.report(findings, "label", bad, "is {value}; a binary task has labels 0 and 1")
    elif loss.mean_squared_error.log1p or loss.pairwise.mean_squared_error.log1p:
        bad = np.flatnonzero((numbers < 0) & np.isfinite(numbers))
        cells.report(findings, "label", bad, "is {value}; log(1 + label) needs labels of 0 or more")


def check_ragged(findings: RowFindings, cells: ColumnValues, first: ColumnValues) -> None:
    """Reports rows whose lists of events, or of candidates, differ in length."""
    # Bytes are compared faster than arrays.
    if cells.lists[0].offsets.tobytes() == first.lists[0].offsets.tobytes():
        return
    lengths, expected = cells.lists[0].lengths, first.lists[0].lengths
    rows = np.flatnonzero(lengths != expected)

    def sentence(i: int) -> str:
        row = rows[i]
        return f"{cells.column.name} has {lengths[row]} items, {first.column.name} has {expected[row]}."

    findings.add("ragged", rows, sentence)


def check_order(findings: RowFindings, events: Lists, request_time: np.ndarray) -> None:
    """Reports histories that are not sorted by time (equal times are fine) or end after the request."""
    times = integers(events.values)
    down = np.flatnonzero(times[1:] < times[:-1]) + 1
    rows = events.rows_of(down)
    within = events.offsets[rows] != down
    down, rows = down[within], rows[within]

    def unsorted(i: int) -> str:
        place = int(down[i] - events.offsets[rows[i]])
        return (
            f"uih_timestamps[{place}] is {times[down[i]]}, the one before it {times[down[i] - 1]}: "
            "not sorted; a history is sorted by time, oldest first. The preparation tools sort."
        )

    findings.add("unsorted", rows, unsorted)
    filled = np.flatnonzero(events.offsets[1:] > events.offsets[:-1])
    if len(down) == 0 and (times[events.offsets[1:][filled] - 1] <= request_time[filled]).all():
        # Histories are sorted, so their last event is their latest.
        return
    late_place = np.flatnonzero(times > np.repeat(request_time, events.lengths))
    late = events.rows_of(late_place)

    def future(i: int) -> str:
        place = int(late_place[i] - events.offsets[late[i]])
        return (
            f"uih_timestamps[{place}] is {times[late_place[i]]}, later than request_time "
            f"{request_time[late[i]]}; a model would be trained on what it cannot know."
        )

    findings.add("future_event", late, future)


def check_candidate_times(findings: RowFindings, candidates: Lists, events: Lists) -> None:
    """Reports candidates that were shown before the newest event of their row's history."""
    times, history = integers(candidates.values), integers(events.values)
    filled = events.lengths > 0
    newest = np.full(len(filled), np.iinfo(np.int64).min)
    newest[filled] = history[events.offsets[1:][filled] - 1]
    early = np.flatnonzero(times < np.repeat(newest, candidates.lengths))
    rows = candidates.rows_of(early)

    def sentence(i: int) -> str:
        place = int(early[i] - candidates.offsets[rows[i]])
        newest_event = newest[rows[i]]
        return (
            f"candidate_timestamps[{place}] is {times[early[i]]}, before the newest event at {newest_event}."
        )

    findings.add("future_event", rows, sentence)


def check_keys(findings: RowFindings, keys: pa.Table) -> None:
    """Reports nulls in key columns."""
    for name in keys.column_names:
        if keys[name].null_count:
            rows = _true(pc.is_null(one_array(keys[name])))
            findings.add("null", rows, lambda i, name=name: f"key column {name} is null.")


def check_repeats(findings: RowFindings, keys: pa.Table) -> None:
    """Reports equal rows in a table of key columns and request times.

    `plan.duplicates` finds repeated rows in different tables.
    """
    if len(keys) < 2:
        return
    hashes, complete_rows = hash_keys(keys)
    _, first, place = np.unique(hashes[complete_rows], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[place] != np.arange(len(complete_rows)))
    rows = complete_rows[again]

    def sentence(i: int) -> str:
        key = same_key(keys.slice(rows[i], 1).to_pylist()[0])
        distance = int(rows[i] - complete_rows[first[place[again[i]]]])
        return f"{key} as another row, {distance} row{'s' * (distance > 1)} before it."

    findings.add("duplicate_key", rows, sentence)


def _check_range(findings: RowFindings, cells: ColumnValues) -> None:
    values = cells.values
    if pa.types.is_floating(values.type):
        numbers = floats(values)
    else:
        if pa.types.is_uint64(values.type):
            limit = pa.scalar(2**63 - 1, pa.uint64())
            cells.report(
                findings, "too_large", _true(pc.greater(values, limit)), "is {value}, more than int64 holds"
            )
            values = pc.min_element_wise(values, limit)
        numbers = integers(values)
    if len(numbers) and numbers.min() < 0:
        template = f"is {{value}}; {_MEANING[cells.column.kind]} are 0 or larger"
        cells.report(findings, "negative", np.flatnonzero(numbers < 0), template)
    if cells.column.kind is Kind.TIME and len(numbers) and numbers.max() > _LATEST_TIME:
        template = "is {value}, which looks like milliseconds; times are seconds"
        cells.report(findings, "too_large", np.flatnonzero(numbers > _LATEST_TIME), template)


_MEANING = {
    Kind.FEATURE: "ids",
    Kind.TIME: "times",
    Kind.ACTIONS: "action masks",
    Kind.LABEL_BITS: "masks of labels",
    Kind.WATCH_TIME: "watch times",
    Kind.WEIGHT: "weights",
}


def _check_floats(findings: RowFindings, cells: ColumnValues) -> None:
    """Reports NaN, infinities, and numbers that are too large for float32."""
    values, limit = cells.values, cells.column.largest
    if len(values) and not values.null_count:
        numbers = floats(values)
        # Minimum and maximum are NaN if a value is.
        if float(numbers.min()) >= -limit and float(numbers.max()) <= limit:
            return
    # Nulls are not reported as NaN: they have been reported, or will be replaced.
    places = _true(pc.invert(pc.is_finite(values)))
    cells.report(findings, "not_finite", places, "is {value}; NaN and infinities have no meaning here")
    numbers = floats(values).astype(np.float64, copy=False)
    places = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) > limit))
    cells.report(findings, "too_large", places, "is {value}, more than the model's float32 can hold")


def _true(mask: pa.Array) -> np.ndarray:
    """Returns the indices that are True; nulls count as False."""
    return np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))
