"""From a table of original values to numpy arrays: checked, ids mapped to table rows, numbers scaled.

A row group is converted once, as a whole, into a `Block`; `gather` then picks the rows of many batches out of
it. Runs in the reader processes, so it knows numpy and pyarrow but no torch. There is no Python loop over
rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys import features
from recsys import protos as pb
from recsys.data import checks
from recsys.data.checks import Cells, Findings, Lists, one_array
from recsys.data.contract import Kind, Mode, fields, group_column, key_columns
from recsys.data.vocabulary import mappings, normalize

REQUEST_TIME = features.REQUEST_TIME
UIH_TIMESTAMPS = features.PREFIX[pb.HISTORY] + features.TIMESTAMPS
UIH_ACTIONS = features.PREFIX[pb.HISTORY] + features.ACTIONS
UIH_WATCH_TIME = features.PREFIX[pb.HISTORY] + features.WATCH_TIME
CANDIDATE_TIMESTAMPS = features.PREFIX[pb.CANDIDATE] + features.TIMESTAMPS


class Flat(NamedTuple):
    """A column laid end to end. `counts` is None, or the number of values of each row / event / candidate."""

    values: np.ndarray
    counts: np.ndarray | None = None


class Spans(NamedTuple):
    """Which elements belong to each row: lengths[i] of them from starts[i] on. Truncation only moves
    these."""

    starts: np.ndarray
    lengths: np.ndarray


@dataclass
class Block:
    """The rows of one table, converted.

    Attributes:
        file: index of the file in its source.
        first_row: the file's row that is row 0 here.
        codes: int8 [rows], why a row was left out: 0 it was not, else 1 + index into checks.REASONS.
        place: int64 [rows], place among the kept rows, -1 when left out.
        spans: by side, in kept rows.
        flat: by column.
        truncated: by side, bool [kept] whether the row had more events or candidates.
        group: int64 [kept].
        keys: key columns of all rows.
    """

    file: int
    first_row: int
    codes: np.ndarray
    place: np.ndarray
    spans: dict[int, Spans]
    flat: dict[str, Flat]
    truncated: dict[int, np.ndarray]
    group: np.ndarray
    keys: pa.Table | None


class Converter:
    """Applies one config to tables."""

    def __init__(self, pipeline: pb.Pipeline, num_contextual: int, *, targets: bool, mode: Mode) -> None:
        """Reads the vocabularies.

        Args:
            pipeline: resolved.
            num_contextual: contextual tokens of each row.
            targets: candidates are tokens; then a row must fit into `model.max_seq_len`.
            mode: what the rows are for.

        Raises:
            DataError: a vocabulary that cannot be used.
        """
        self.pipeline = pipeline
        self.mode = mode
        self.mappings = mappings(pipeline)
        self._fields = fields(pipeline, mode)
        self._identity = list(pipeline.data.key_columns)
        self._tables = {column.name: column.table for column in features.columns(pipeline)}
        self._max_tokens = (
            pipeline.model.max_seq_len - num_contextual if targets and pipeline.model.max_seq_len else None
        )

    def block(self, table: pa.Table, *, file: int = 0, first_row: int = 0, path: str = "table") -> Block:
        """Checks and converts all rows of a table.

        Args:
            table: the columns of `contract.needed_columns`, of types that `contract.check_schema` accepted.
            file: index of the file in its source.
            first_row: the file's row that the table begins with.
            path: the file's name for errors.

        Raises:
            DataError: a bad row, unless the policy is to leave them out.
        """
        cells = self._cells(table)
        findings = self._check(table, cells)
        if self.pipeline.data.bad_rows.policy != pb.BadRows.SKIP:
            findings.raise_first(path, first_row)
        good = findings.codes == 0
        kept = table if good.all() else table.filter(pa.array(good))
        if kept is not table:
            cells = self._cells(kept)
        spans, truncated = self._spans(cells, kept.num_rows)
        return Block(
            file=file,
            first_row=first_row,
            codes=findings.codes,
            place=np.where(good, np.cumsum(good) - 1, -1),
            spans=spans,
            flat={name: self._flat(one) for name, one in cells.items()},
            truncated=truncated,
            group=self._group(kept),
            keys=table.select(list(self.pipeline.data.key_columns)) if self.mode != "train" else None,
        )

    def _cells(self, table: pa.Table) -> dict[str, Cells]:
        found = {}
        for field in self._fields:
            if field.column not in table.column_names:
                continue
            column, lists = one_array(table[field.column]), ()
            for _ in range(field.depth):
                lists = (*lists, Lists.of(column))
                column = lists[-1].values
            found[field.column] = Cells(field, lists, _plain(column))
        return found

    def _check(self, table: pa.Table, cells: dict[str, Cells]) -> Findings:
        findings = Findings(table.num_rows)
        first: dict[int, Cells] = {}
        for one in cells.values():
            checks.check_nulls(findings, one, one_array(table[one.field.column]))
            checks.check_values(findings, one)
            if one.field.side != pb.USER:
                checks.check_ragged(findings, one, first.setdefault(one.field.side, one))
        request_time = checks.integers(cells[REQUEST_TIME].values)
        events = cells[UIH_TIMESTAMPS].lists[0]
        checks.check_order(findings, events, request_time)
        if CANDIDATE_TIMESTAMPS in cells:
            checks.check_candidate_times(findings, cells[CANDIDATE_TIMESTAMPS].lists[0], events)
        candidates = _candidates(cells)
        if candidates is not None:
            self._check_length(findings, events.lengths, candidates.lengths)
        checks.check_keys(findings, table.select(key_columns(self.pipeline)), self._identity, request_time)
        return findings

    def _check_length(self, findings: Findings, num_events: np.ndarray, num_candidates: np.ndarray) -> None:
        data = self.pipeline.data
        events = np.minimum(num_events, data.max_history_len)
        # Candidates are cut only where a missing score does no harm.
        cut = data.HasField("max_candidates") and self.mode != "predict"
        if data.HasField("max_candidates"):
            most, setting = (
                np.full(len(events), data.max_candidates),
                f"data.max_candidates is {data.max_candidates}",
            )
        elif self._max_tokens is not None:
            most, setting = (
                self._max_tokens - events,
                f"model.max_seq_len is {self.pipeline.model.max_seq_len}",
            )
        else:
            return
        rows = np.flatnonzero(num_candidates > most) if not cut else np.empty(0, np.int64)
        findings.add(
            "too_many_candidates",
            rows,
            lambda i: (
                f"{num_candidates[rows[i]]} candidates behind {events[rows[i]]} events; at most "
                f"{max(0, most[rows[i]])} fit ({setting}). Raise it or split the row."
            ),
        )

    def _spans(
        self, cells: dict[str, Cells], num_rows: int
    ) -> tuple[dict[int, Spans], dict[int, np.ndarray]]:
        data = self.pipeline.data
        nothing = np.zeros(num_rows, np.int64)
        spans = {
            pb.USER: Spans(np.arange(num_rows), np.ones(num_rows, np.int64)),
            pb.CANDIDATE: Spans(nothing, nothing),
        }
        truncated = {pb.HISTORY: nothing > 0, pb.CANDIDATE: nothing > 0}
        events = cells[UIH_TIMESTAMPS].lists[0]
        kept = np.minimum(events.lengths, data.max_history_len)
        # Of a history the newest events are kept, of candidates the first.
        spans[pb.HISTORY] = Spans(events.offsets[1:] - kept, kept)
        truncated[pb.HISTORY] = kept < events.lengths
        candidates = _candidates(cells)
        if candidates is not None:
            kept = candidates.lengths
            if data.HasField("max_candidates"):
                kept = np.minimum(kept, data.max_candidates)
            spans[pb.CANDIDATE] = Spans(candidates.offsets[:-1], kept)
            truncated[pb.CANDIDATE] = kept < candidates.lengths
        return spans, truncated

    def _flat(self, cells: Cells) -> Flat:
        field, values = cells.field, cells.values
        counts = cells.lists[-1].lengths if field.multi_valued else None
        if field.kind is Kind.ID:
            return Flat(self.mappings[self._tables[field.column]].map(values), counts)
        if field.kind in (Kind.LABEL, Kind.WATCH_TIME):
            return Flat(checks.floats(values).astype(np.float32))
        if field.kind is not Kind.NUMBER:
            return Flat(checks.integers(values))
        numeric = field.feature.numeric
        numbers = checks.floats(values)
        if values.null_count:
            numbers = np.where(pc.is_null(values).to_numpy(zero_copy_only=False), numeric.fill, numbers)
        if numeric.HasField("bucketize"):
            return Flat(self.mappings[field.feature.name].map(numbers))
        return Flat(normalize(numbers, numeric.normalize))

    def _group(self, table: pa.Table) -> np.ndarray:
        name = group_column(self.pipeline)
        if name is None:
            return np.zeros(table.num_rows, np.int64)
        return checks.key_hash(one_array(table[name]))


def _plain(values: pa.Array) -> pa.Array:
    """Without the types that numpy would not take: dictionaries, half floats, and the type of a column
    without values."""
    if pa.types.is_dictionary(values.type):
        return values.dictionary_decode()
    if pa.types.is_float16(values.type):
        return values.cast(pa.float32())
    return values.cast(pa.int64()) if pa.types.is_null(values.type) else values


def _candidates(cells: dict[str, Cells]) -> Lists | None:
    return next((one.lists[0] for one in cells.values() if one.field.side == pb.CANDIDATE), None)
