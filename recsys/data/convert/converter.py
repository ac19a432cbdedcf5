"""Converts a table of original values to numpy arrays: checks rows, maps ids to table rows, scales numbers.

A row group is converted once, as a whole, into a `ColumnBlock`, from which the rows of many batches are
taken. This runs in the reader processes, so it imports numpy and pyarrow but not torch, and has no Python
loop over rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.arrow import floats, integers, one_array
from recsys.data.convert import row_checks
from recsys.data.convert.column_block import (
    ColumnBlock,
    FlatColumn,
    counts_of,
    flat_indices,
    offsets_of,
    pick,
)
from recsys.data.convert.row_checks import ColumnValues, Lists, RowFindings
from recsys.data.convert.stochastic_length import subsample
from recsys.data.hashing import combine, draw_places, hash_text
from recsys.data.plan.duplicates import Duplicates
from recsys.data.schema.contract import FileColumn, Kind, Mode, file_columns, group_column, key_columns
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.schema.row_keys import key_hash
from recsys.data.schema.vocabulary import mappings

REQUEST_TIME = features.REQUEST_TIME
UIH_TIMESTAMPS = features.PREFIX[pb.HISTORY] + features.TIMESTAMPS
UIH_ACTIONS = features.PREFIX[pb.HISTORY] + features.ACTIONS
UIH_WATCH_TIME = features.PREFIX[pb.HISTORY] + features.WATCH_TIME
CANDIDATE_TIMESTAMPS = features.PREFIX[pb.CANDIDATE] + features.TIMESTAMPS

_UNKNOWN, _LENGTH = 3, 5
"""Hash streams of unknown ids and of subsampled events. The plan uses streams 1 and 2, negatives 4."""

_INT32 = np.iinfo(np.int32)


class Origin(NamedTuple):
    """The location of a table in its source.

    Attributes:
        file: index of its file in the source.
        first_row: row of the file at which the table begins.
        path: the file's name, for errors.
        epoch: number of the epoch; with `train.seed` it decides which ids become unknown in training.
    """

    file: int = 0
    first_row: int = 0
    path: str = "table"
    epoch: int = 0


class _Spans(NamedTuple):
    """The kept elements of each row: lengths[i] elements starting at starts[i]; cut[i] is True if the file
    has more."""

    starts: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray


class Converter:
    """Checks and converts tables by the rules of one config.

    Args:
        pipeline: resolved.
        rule: how rows become sequences; if candidates are tokens, a row must fit into `model.max_seq_len`.
        table_mappings: the mapping of each embedding table, as `vocabulary.mappings` reads them.
        mode: purpose of the rows.
    """

    def __init__(
        self, pipeline: pb.Pipeline, rule: LayoutRule, table_mappings: dict[str, Any], *, mode: Mode
    ) -> None:
        self.pipeline = pipeline
        self.mode = mode
        self.mappings = table_mappings
        self._columns = file_columns(pipeline, mode)
        self._skips = pipeline.data.bad_rows.policy == pb.BadRows.SKIP
        read = {column.name for column in self._columns}
        self._features = [
            column
            for column in features.columns(pipeline)
            if read.issuperset(column.kind.columns(column.side))
        ]
        self._unknown_rates = _unknown_rates(self._features) if mode == "train" else {}
        names = list(self._unknown_rates)
        self._name_hashes = dict(zip(names, hash_text(pa.array(names, pa.string())), strict=True))
        self._rule = rule
        self._seen = None
        if model_of(pipeline).removes_seen(mode):
            self._seen = features.PREFIX[pb.HISTORY] + features.searched_item(pipeline).name

    @classmethod
    def open(cls, pipeline: pb.Pipeline, rule: LayoutRule, *, mode: Mode) -> "Converter":
        """Reads the vocabularies.

        Raises:
            DataError: a vocabulary cannot be used.
        """
        return cls(pipeline, rule, mappings(pipeline), mode=mode)

    def block(self, table: pa.Table, origin: Origin, duplicates: Duplicates | None = None) -> ColumnBlock:
        """Checks and converts all rows of a table.

        Args:
            table: the columns of `contract.needed_columns`, of types that `contract.check_schema` accepted.
            origin: location of the table in its source.
            duplicates: the repeated rows of the source; None searches for repeated rows within the table.

        Raises:
            DataError: a row is bad, unless the policy is to leave bad rows out.
        """
        arrays = self._arrays(table)
        cells = self._cells(arrays)
        findings = self._check(table, arrays, cells)
        self._check_repeats(findings, table, origin, duplicates)
        if not self._skips:
            findings.raise_first(origin.path, origin.first_row)
        good = findings.codes == 0
        good_rows = table
        if not good.all():
            good_rows = table.filter(pa.array(good))
            cells = self._cells(self._arrays(good_rows))
        flat = {
            name: _to_flat(values) for name, values in cells.items() if values.column.kind is not Kind.FEATURE
        }
        for column in self._features:
            parts = [cells[name] for name in column.kind.columns(column.side)]
            flat[column.name] = convert_feature(column, parts, self.mappings.get(column.table))
        if self._unknown_rates:
            self._show_unknown(flat, cells, origin, np.flatnonzero(good))
        if self._seen is not None:
            offsets = cells[self._seen].lists[0].offsets
            flat[features.SEEN] = FlatColumn(pb.USER, flat[self._seen].values, offsets)
        spans = self._spans(cells, good_rows.num_rows)
        kept = {side: flat_indices(span.starts, span.lengths) for side, span in spans.items()}
        if self.mode == "train" and self.pipeline.data.HasField("stochastic_length"):
            events = flat[UIH_TIMESTAMPS].values
            self._subsample(spans, kept, events, self._draws(_LENGTH, origin, np.flatnonzero(good)))
        for name, column in flat.items():
            if column.side in kept:
                flat[name] = pick(column, kept[column.side])
            else:
                flat[name] = _spread_user(column, good)
        return ColumnBlock(
            file=np.full(table.num_rows, origin.file, np.int64),
            row=origin.first_row + np.arange(table.num_rows),
            codes=findings.codes,
            group=_spread(self._group(good_rows), good),
            lengths={side: _spread(span.lengths, good) for side, span in spans.items()},
            cut={side: _spread(span.cut, good) for side, span in spans.items()},
            flat=flat,
            keys=table.select(list(self.pipeline.data.key_columns)) if self.mode != "train" else None,
            bad_rows=findings.sentences,
        )

    def _arrays(self, table: pa.Table) -> dict[str, pa.Array]:
        present = dict(zip(table.column_names, table.columns, strict=True))
        return {c.name: one_array(present[c.name]) for c in self._columns if c.name in present}

    def _cells(self, arrays: dict[str, pa.Array]) -> dict[str, ColumnValues]:
        return {c.name: cells_of(arrays[c.name], c) for c in self._columns if c.name in arrays}

    def _check(
        self, table: pa.Table, arrays: dict[str, pa.Array], cells: dict[str, ColumnValues]
    ) -> RowFindings:
        # Training and evaluation only count bad rows; a prediction also lists them.
        findings = RowFindings(table.num_rows, describe_all=self.mode == "predict" and self._skips)
        first: dict[int, ColumnValues] = {}
        for name, values in cells.items():
            row_checks.check_nulls(findings, values, arrays[name])
            row_checks.check_values(findings, values)
            side = values.column.side
            if side != pb.USER:
                row_checks.check_ragged(findings, values, first.setdefault(side, values))
        for column in self._columns:
            # Tasks may share a column, and a label may serve as weights. `cells` holds such a column only
            # once, with the last of its uses, so check the others here.
            if column.kind in (Kind.LABEL, Kind.WEIGHT) and cells[column.name].column is not column:
                shared = cells[column.name]
                row_checks.check_meaning(findings, ColumnValues(column, shared.lists, shared.values))
        request_time = integers(cells[REQUEST_TIME].values)
        events = cells[UIH_TIMESTAMPS].lists[0]
        row_checks.check_order(findings, events, request_time)
        if CANDIDATE_TIMESTAMPS in cells:
            row_checks.check_candidate_times(findings, cells[CANDIDATE_TIMESTAMPS].lists[0], events)
        candidates = _candidates(cells)
        if candidates is not None:
            self._check_length(findings, events.lengths, candidates.lengths)
        row_checks.check_keys(findings, table.select(key_columns(self.pipeline)))
        return findings

    def _check_repeats(
        self, findings: RowFindings, table: pa.Table, origin: Origin, duplicates: Duplicates | None
    ) -> None:
        if duplicates is None:
            keys = self.pipeline.data.key_columns
            if keys:
                row_checks.check_repeats(findings, table.select(list(dict.fromkeys([*keys, REQUEST_TIME]))))
            return
        rows, places = duplicates.of_table(origin.file, origin.first_row, table.num_rows)
        findings.add("duplicate_key", rows, lambda i: f"has the key of {duplicates.first(int(places[i]))}.")

    def _check_length(
        self, findings: RowFindings, num_events: np.ndarray, num_candidates: np.ndarray
    ) -> None:
        data = self.pipeline.data
        events = np.minimum(num_events, data.max_history_len)
        # Prediction must return a score for every candidate, so it cuts none.
        cut = data.HasField("max_candidates") and self.mode != "predict"
        if data.HasField("max_candidates"):
            limits, setting = (
                np.full(len(events), data.max_candidates),
                f"data.max_candidates is {data.max_candidates}",
            )
        elif self._rule.targets and self.pipeline.model.max_seq_len:
            max_seq_len = self.pipeline.model.max_seq_len
            before = self._rule.num_contextual + self._rule.tokens_per_event * events
            limits, setting = max_seq_len - before, f"model.max_seq_len is {max_seq_len}"
        else:
            return
        rows = np.flatnonzero(num_candidates > limits) if not cut else np.empty(0, np.int64)
        findings.add(
            "too_many_candidates",
            rows,
            lambda i: (
                f"{num_candidates[rows[i]]} candidates after {events[rows[i]]} events; at most "
                f"{max(0, limits[rows[i]])} fit ({setting}). Raise it or split the row."
            ),
        )

    def _spans(self, cells: dict[str, ColumnValues], num_rows: int) -> dict[int, _Spans]:
        """Returns the elements of each row's lists that are kept."""
        data = self.pipeline.data
        events, candidates = cells[UIH_TIMESTAMPS].lists[0], _candidates(cells)
        kept = np.minimum(events.lengths, data.max_history_len)
        # The newest events of a history are kept, and the first candidates.
        history = _Spans(events.offsets[1:] - kept, kept, kept < events.lengths)
        if candidates is None:
            nothing = np.zeros(num_rows, np.int64)
            return {pb.HISTORY: history, pb.CANDIDATE: _Spans(nothing, nothing, nothing > 0)}
        kept = candidates.lengths
        if data.HasField("max_candidates"):
            kept = np.minimum(kept, data.max_candidates)
        return {
            pb.HISTORY: history,
            pb.CANDIDATE: _Spans(candidates.offsets[:-1], kept, kept < candidates.lengths),
        }

    def _show_unknown(
        self, flat: dict[str, FlatColumn], cells: dict[str, ColumnValues], origin: Origin, rows: np.ndarray
    ) -> None:
        """Sets a share of the ids to row 0, so that the row of unknown ids is trained."""
        state = self._draws(_UNKNOWN, origin, rows)
        for column in self._features:
            name = column.name
            if name in self._unknown_rates:
                of_rows = np.arange(len(rows) + 1)
                if column.side != pb.USER:
                    of_rows = cells[column.kind.columns(column.side)[0]].lists[0].offsets
                if flat[name].offsets is not None:
                    of_rows = flat[name].offsets[of_rows]
                hidden = draw_places(of_rows, self._unknown_rates[name], state ^ self._name_hashes[name])
                flat[name].values[hidden] = 0

    def _subsample(
        self,
        spans: dict[int, _Spans],
        kept: dict[int, np.ndarray | slice],
        timestamps: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Subsamples the kept events of long histories."""
        data, span, events = self.pipeline.data, spans[pb.HISTORY], kept[pb.HISTORY]
        drawn = subsample(
            data.stochastic_length, data.max_history_len, span.lengths, timestamps[events], rows
        )
        is_slice = isinstance(events, slice)
        kept[pb.HISTORY] = drawn.places + events.start if is_slice else events[drawn.places]
        spans[pb.HISTORY] = span._replace(lengths=drawn.lengths)

    def _draws(self, stream: int, origin: Origin, rows: np.ndarray) -> np.ndarray:
        """Hashes rows of the table for one purpose, which `stream` identifies; uint64."""
        return combine(self.pipeline.train.seed, origin.epoch, stream, origin.file, origin.first_row + rows)

    def _group(self, table: pa.Table) -> np.ndarray:
        name = group_column(self.pipeline)
        if name is None:
            return np.zeros(table.num_rows, np.int64)
        return key_hash(one_array(table[name]))


def cells_of(array: pa.Array, column: FileColumn) -> ColumnValues:
    """Extracts the values of one column, with the lists around them."""
    lists = ()
    for _ in range(column.depth):
        lists = (*lists, Lists.of(array))
        array = lists[-1].values
    return ColumnValues(column, lists, _plain(array))


def convert_feature(column: features.Column, parts: Sequence[ColumnValues], mapping: Any) -> FlatColumn:
    """Converts checked values to what a feature's kind makes of them: table rows or numbers.

    Args:
        column: the feature on one side.
        parts: the columns that its kind reads.
        mapping: the mapping of the feature's embedding table; None without one.

    Raises:
        TypeError, ValueError: the kind returned something else than its declaration says.
    """
    kind = column.kind
    result, offsets = kind.convert([part.values for part in parts], mapping), None
    count = len(parts[0].values)
    if kind.lists:
        offsets = parts[0].lists[-1].offsets
    elif kind.multi_valued:
        result, counts = result
        offsets = offsets_of(np.asarray(counts))
        if len(counts) != count or offsets[-1] != len(result):
            raise ValueError(_wrong(column, f"{len(result)} rows with {len(counts)} counts", count))
        count = len(result)
    if column.table is None:
        result = np.asarray(result, np.float32)
        if result.shape != (count, *column.batch_shape):
            raise ValueError(_wrong(column, f"numbers of the shape {list(result.shape)}", count))
    elif result.dtype.kind not in "iu" or result.shape != (count,):
        raise TypeError(_wrong(column, f"{result.dtype} of the shape {list(result.shape)}", count))
    elif mapping is None and count and not 0 <= int(result.min()) <= int(result.max()) < kind.rows:
        raise ValueError(_wrong(column, f"rows from {result.min()} to {result.max()}", count))
    return FlatColumn(column.side, result, offsets)


def _wrong(column: features.Column, given: str, count: int) -> str:
    kind = column.kind
    wanted = (
        f"integers from 0 to {kind.rows - 1}" if column.table else f"float32 {[count, *column.batch_shape]}"
    )
    name = f"{type(kind).__module__}.{type(kind).__name__}.convert"
    return f"{name} returned {given} for {count} values of {column.name}; expected are {wanted}"


def _to_flat(cells: ColumnValues) -> FlatColumn:
    """Converts checked values of a column that belongs to no feature."""
    column, values = cells.column, cells.values
    if column.kind in (Kind.LABEL, Kind.WATCH_TIME, Kind.WEIGHT):
        return FlatColumn(column.side, floats(values).astype(np.float32, copy=False))
    return FlatColumn(column.side, _narrow(integers(values)))


def _narrow(values: np.ndarray) -> np.ndarray:
    """Casts to int32 if all values fit, which halves the bytes to copy for each row."""
    if len(values) and (values.min() < _INT32.min or values.max() > _INT32.max):
        return values
    return values.astype(np.int32)


def _unknown_rates(columns: list[features.Column]) -> dict[str, float]:
    """Returns the `unknown_rate` of each column that has one above 0."""
    vocabularies = {column.name: column.kind.vocabulary for column in columns}
    rates = {
        name: vocabulary.unknown_rate for name, vocabulary in vocabularies.items() if vocabulary is not None
    }
    return {name: rate for name, rate in rates.items() if rate > 0}


def _spread(values: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Scatters the values of the good rows over all rows, with zeros for bad rows."""
    if len(values) == len(good):
        return values
    spread = np.zeros((len(good), *values.shape[1:]), values.dtype)
    spread[good] = values
    return spread


def _spread_user(column: FlatColumn, good: np.ndarray) -> FlatColumn:
    if column.side != pb.USER:
        return column
    if column.offsets is None:
        return column._replace(values=_spread(column.values, good))
    return column._replace(offsets=offsets_of(_spread(counts_of(column.offsets), good)))


def _plain(values: pa.Array) -> pa.Array:
    """Casts types that numpy does not accept: dictionaries, half floats, null type."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return values.dictionary_decode()
    if pa.types.is_float16(kind):
        return values.cast(pa.float32())
    return values.cast(pa.int64()) if pa.types.is_null(kind) else values


def _candidates(cells: dict[str, ColumnValues]) -> Lists | None:
    return next((values.lists[0] for values in cells.values() if values.column.side == pb.CANDIDATE), None)
