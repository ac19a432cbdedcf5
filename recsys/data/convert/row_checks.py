"""The contract of a row, checked over all rows of a table at once.

Each check adds the rows that break it to `Findings`, with a reason (they are counted by it) and a sentence
that is only made for the first one. What a whole file can have wrong (columns, types) is in `contract`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config.checks import loss_kind
from recsys.data.arrow import is_text, one_array
from recsys.data.hashing import combine, hash_text
from recsys.data.schema.contract import Field, Kind
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

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

_LATEST_TIME = 100_000_000_000
"""Seconds; year 5138. Milliseconds of any day since 1973 are larger."""


class Findings:
    """Bad rows of one table, each under the first reason that was found for it."""

    def __init__(self, num_rows: int) -> None:
        self.codes = np.zeros(num_rows, np.int8)
        """0 for a good row, else 1 + index into REASONS."""
        self._first: tuple[int, str] | None = None

    def add(self, reason: str, rows: np.ndarray, sentence: Callable[[int], str]) -> None:
        """Notes bad rows.

        Args:
            reason: one of REASONS.
            rows: row numbers within the table, ascending, may repeat.
            sentence: called with an index into `rows`, says what is wrong there.
        """
        if len(rows) == 0:
            return
        fresh = rows[self.codes[rows] == 0]
        self.codes[fresh] = 1 + REASONS.index(reason)
        if self._first is None or rows[0] < self._first[0]:
            self._first = (int(rows[0]), sentence(0))

    def raise_first(self, file: str, first_row: int, *, skippable: bool = True) -> None:
        """Raises DataError for the first bad row, if there is one. Rows count from 0 within the file.

        `skippable`: `data.bad_rows` could leave it out.
        """
        if self._first is None:
            return
        row, sentence = self._first
        more = int(np.count_nonzero(self.codes)) - 1
        others = f" ({more} more bad row{'s' * (more > 1)} in this row group.)" if more else ""
        or_skip = ", or leave such rows out and count them: data.bad_rows { policy: SKIP }"
        remedy = f"Correct the file{or_skip if skippable else ''}."
        raise DataError(f"{file}, row {first_row + row}: {sentence}{others} {remedy}")


@dataclass(frozen=True)
class Lists:
    """A column of lists: row i has values[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray
    values: pa.Array

    @classmethod
    def of(cls, column: pa.Array) -> "Lists":
        """Without copying; a null list counts as empty (`check_nulls` has reported it)."""
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.large_list(column.type.value_type))
        if column.null_count:
            column = pc.fill_null(column, pa.scalar([], column.type))
        offsets = column.offsets.to_numpy().astype(np.int64, copy=False)
        return cls(offsets - offsets[0], column.values.slice(offsets[0], offsets[-1] - offsets[0]))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def rows_of(self, places: np.ndarray) -> np.ndarray:
        """Rows in which the values at flat `places` stand."""
        return np.searchsorted(self.offsets, places, side="right") - 1


class Cells:
    """One column's values with the row that each belongs to, for checks and their sentences."""

    def __init__(self, field: Field, lists: tuple[Lists, ...], values: pa.Array) -> None:
        self.field = field
        self.lists = lists
        self.values = values

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Row of the table for flat places of the innermost values."""
        for level in reversed(self.lists):
            places = level.rows_of(places)
        return places

    def row_offsets(self, num_rows: int) -> np.ndarray:
        """Where each row's innermost values begin, and the end of the last; int64 [num_rows + 1]."""
        offsets = np.arange(num_rows + 1)
        for level in self.lists:
            offsets = level.offsets[offsets]
        return offsets

    def name(self, place: int) -> str:
        """`uih_item_id[3]`: the column and where in the row's lists."""
        index = ""
        for level in reversed(self.lists):
            row = int(level.rows_of(np.asarray([place]))[0])
            index = f"[{place - int(level.offsets[row])}]{index}"
            place = row
        return self.field.column + index

    def report(self, findings: Findings, reason: str, places: np.ndarray, what: str) -> None:
        """Adds rows for flat `places`; `what` may use {value}."""

        def sentence(i: int) -> str:
            place = int(places[i])
            return f"{self.name(place)} {what.format(value=self.values[place].as_py())}."

        if len(places):
            findings.add(reason, self.rows(places), sentence)


def check_nulls(findings: Findings, cells: Cells, column: pa.Array) -> None:
    """Nulls where a whole list (or a plain value with nothing to put in its place) should be."""
    field = cells.field
    if column.null_count and (field.depth or not has_fill(field)):
        hint = ". An empty list is written [], not null" if field.depth else _instead_of_null(field)
        findings.add("null", _true(pc.is_null(column)), lambda i: f"{field.column} is null{hint}.")
    if field.depth == 2 and cells.lists[0].values.null_count:
        outer = cells.lists[0]
        rows = outer.rows_of(_true(pc.is_null(outer.values)))
        findings.add(
            "null", rows, lambda i: f"{field.column} has a null list in it. An empty list is written []."
        )


def _instead_of_null(field: Field) -> str:
    """How a value that nobody knows is given to the model; the end of a sentence."""
    if field.kind is Kind.ID:
        return "; what is not known is an id that the vocabulary has not, such as an empty text"
    return "; numeric.fill of the feature gives nulls a value" if field.kind is Kind.NUMBER else ""


def check_values(findings: Findings, cells: Cells) -> None:
    """Nulls inside lists, signs, ranges and NaN, as the column's kind wants them."""
    values, field = cells.values, cells.field
    if values.null_count and cells.lists and not has_fill(field):
        cells.report(findings, "null", _true(pc.is_null(values)), f"is null{_instead_of_null(field)}")
    if pa.types.is_floating(values.type):
        _check_floats(findings, cells)
    if field.kind is Kind.LABEL:
        check_label(findings, cells)
    elif field.kind is not Kind.NUMBER and not is_text(values.type):
        _check_range(findings, cells)


def check_label(findings: Findings, cells: Cells) -> None:
    """Labels that the loss of their task cannot take."""
    loss, numbers = cells.field.task.loss, floats(cells.values)
    if loss_kind(loss) == "binary":
        bad = np.flatnonzero((numbers != 0) & (numbers != 1) & np.isfinite(numbers))
        cells.report(findings, "label", bad, "is {value}; a binary task has labels 0 and 1")
    elif loss.mean_squared_error.log1p or loss.pairwise.mean_squared_error.log1p:
        bad = np.flatnonzero((numbers < 0) & np.isfinite(numbers))
        cells.report(findings, "label", bad, "is {value}; log(1 + label) wants labels of 0 or more")


def check_ragged(findings: Findings, cells: Cells, other: Cells) -> None:
    """Lists of one row that describe the same events (or candidates) have the same length."""
    if np.array_equal(cells.lists[0].offsets, other.lists[0].offsets):
        return
    lengths, expected = cells.lists[0].lengths, other.lists[0].lengths
    rows = np.flatnonzero(lengths != expected)

    def sentence(i: int) -> str:
        row = rows[i]
        return f"{cells.field.column} has {lengths[row]} items, {other.field.column} has {expected[row]}."

    findings.add("ragged", rows, sentence)


def check_order(findings: Findings, events: Lists, request_time: np.ndarray) -> None:
    """Timestamps of a history ascend (equal ones may follow each other) and none is later than the
    request."""
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
        # Sorted ones are as late as their last.
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


def check_candidate_times(findings: Findings, candidates: Lists, events: Lists) -> None:
    """No candidate was shown before the newest event of the history that it is scored with."""
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


def check_keys(findings: Findings, keys: pa.Table) -> None:
    """Key columns have no nulls."""
    for name in keys.column_names:
        if keys[name].null_count:
            rows = _true(pc.is_null(one_array(keys[name])))
            findings.add("null", rows, lambda i, name=name: f"key column {name} is null.")


def check_repeats(findings: Findings, keys: pa.Table) -> None:
    """No two rows of a table of key columns and request times are the same; `duplicates` finds those that
    stand in different tables."""
    hashes, known = hash_keys(keys)
    _, first, place = np.unique(hashes[known], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[place] != np.arange(len(known)))
    rows = known[again]

    def sentence(i: int) -> str:
        key = same_key(keys.slice(rows[i], 1).to_pylist()[0])
        return f"{key} as another row, {rows[i] - known[first[place[again[i]]]]} before it."

    findings.add("duplicate_key", rows, sentence)


def hash_keys(keys: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """uint64 hash of each row of some key columns; int64 rows without a null, which others report."""
    columns = [one_array(column) for column in keys.columns]
    known = np.ones(len(keys), bool)
    for column in columns:
        if column.null_count:
            known &= column.is_valid().to_numpy(zero_copy_only=False)
    return combine(*(key_hash(column) for column in columns)), np.flatnonzero(known)


def same_key(key: dict[str, Any]) -> str:
    """`has the same user_id = 3 and request_time = 1030`: what is said of a row that repeats another."""
    return "has the same " + " and ".join(f"{name} = {value!r}" for name, value in key.items())


def key_hash(values: pa.Array) -> np.ndarray:
    """int64 of each value of a key column: the value itself when it is an integer, else a hash of its
    text."""
    if pa.types.is_integer(values.type):
        return integers(values)
    return hash_text(pc.fill_null(values.cast(pa.large_string()), "")).view(np.int64)


def has_fill(field: Field) -> bool:
    """Whether a null of this column has a value to take."""
    return field.kind is Kind.NUMBER and field.feature.numeric.HasField("fill")


def integers(values: pa.Array) -> np.ndarray:
    """int64 of an integer array; nulls give 0 (they have been reported)."""
    if values.null_count:
        values = pc.fill_null(values, pa.scalar(0, values.type))
    return values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def _check_range(findings: Findings, cells: Cells) -> None:
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
        what = f"is {{value}}; {_MEANING[cells.field.kind]} are 0 or larger"
        cells.report(findings, "negative", np.flatnonzero(numbers < 0), what)
    if cells.field.kind is Kind.TIME and len(numbers) and numbers.max() > _LATEST_TIME:
        what = "is {value}, which looks like milliseconds; times are seconds"
        cells.report(findings, "too_large", np.flatnonzero(numbers > _LATEST_TIME), what)


_MEANING = {
    Kind.ID: "ids",
    Kind.TIME: "times",
    Kind.ACTIONS: "action masks",
    Kind.LABEL_BITS: "masks of labels",
    Kind.WATCH_TIME: "watch times",
}


def floats(values: pa.Array) -> np.ndarray:
    """float32 as it is, else float64, of a number or boolean array; nulls give NaN."""
    if not pa.types.is_float32(values.type):
        values = values.cast(pa.float64(), safe=False)
    return values.to_numpy(zero_copy_only=False)


def _check_floats(findings: Findings, cells: Cells) -> None:
    """NaN, infinities, and what would become one in float32."""
    values, limit = cells.values, _largest(cells.field)
    if len(values) and not values.null_count:
        numbers = floats(values)
        # Both are NaN where one value is.
        if float(numbers.min()) >= -limit and float(numbers.max()) <= limit:
            return
    # A null is not a NaN: it was reported, or has a value to take.
    places = _true(pc.invert(pc.is_finite(values)))
    cells.report(findings, "not_finite", places, "is {value}; NaN and infinities have no meaning here")
    numbers = floats(values).astype(np.float64, copy=False)
    places = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) > limit))
    cells.report(findings, "too_large", places, "is {value}, more than the model's float32 holds")


def _largest(field: Field) -> float:
    """The largest number of a column that the model can be given."""
    numeric = field.feature.numeric if field.kind is Kind.NUMBER and field.feature else None
    if numeric is None:
        return _LARGEST_FLOAT32
    if numeric.HasField("bucketize") or numeric.normalize.log1p:
        return np.finfo(np.float64).max
    return _LARGEST_FLOAT32 * numeric.normalize.std - abs(numeric.normalize.mean)


def _true(mask: pa.Array) -> np.ndarray:
    return np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))
