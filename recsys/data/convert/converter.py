"""From a table of original values to numpy arrays: checked, ids mapped to table rows, numbers scaled.

A row group is converted once, as a whole, into a `Block`; `gather` then picks the rows of many batches out of
it. Runs in the reader processes, so it knows numpy and pyarrow but no torch. There is no Python loop over
rows.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys import protos as pb
from recsys.config import features
from recsys.data.arrow import one_array
from recsys.data.convert import row_checks
from recsys.data.convert.block import Block, Flat, offsets_of, pick, places
from recsys.data.convert.row_checks import Cells, Findings, Lists
from recsys.data.convert.stochastic_length import thin_out
from recsys.data.hashing import combine, draw_places, hash_text
from recsys.data.plan.duplicates import Duplicates
from recsys.data.schema.contract import Field, Kind, Mode, fields, group_column, key_columns
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.schema.vocabulary import Buckets, HashBuckets, Vocabulary, mappings, normalize, row_type

REQUEST_TIME = features.REQUEST_TIME
UIH_TIMESTAMPS = features.PREFIX[pb.HISTORY] + features.TIMESTAMPS
UIH_ACTIONS = features.PREFIX[pb.HISTORY] + features.ACTIONS
UIH_WATCH_TIME = features.PREFIX[pb.HISTORY] + features.WATCH_TIME
CANDIDATE_TIMESTAMPS = features.PREFIX[pb.CANDIDATE] + features.TIMESTAMPS

Mapping = Vocabulary | HashBuckets | Buckets
"""From original values to rows of a table."""

_UNKNOWN, _LENGTH = 3, 5
"""Streams of the hash that draw what is shown as unknown and what is thinned out; the plan has 1 and 2, the
negatives 4."""


_INT32 = np.iinfo(np.int32)


class Origin(NamedTuple):
    """Where a table comes from.

    Attributes:
        file: index of its file in the source.
        first_row: the file's row that the table begins with.
        path: the file's name, for errors.
        epoch: decides, with `train.seed`, which ids are shown as unknown in training.
    """

    file: int = 0
    first_row: int = 0
    path: str = "table"
    epoch: int = 0


class _Spans(NamedTuple):
    """Of each row, lengths[i] elements from starts[i] on are kept; cut[i] says that there were more."""

    starts: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray


class Converter:
    """Applies one config to tables."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, *, mode: Mode) -> None:
        """Reads the vocabularies.

        Args:
            pipeline: resolved.
            rule: how rows become sequences; where candidates are tokens, a row must fit into
                `model.max_seq_len`.
            mode: what the rows are for.

        Raises:
            DataError: a vocabulary that cannot be used.
        """
        self.pipeline = pipeline
        self.mode = mode
        self.mappings = mappings(pipeline)
        self._fields = fields(pipeline, mode)
        self._unknown_rates = _unknown_rates(self._fields) if mode == "train" else {}
        names = list(self._unknown_rates)
        self._name_hashes = dict(zip(names, hash_text(pa.array(names, pa.string())), strict=True))
        self._tables = {column.name: column.table for column in features.columns(pipeline)}
        self._rule = rule

    def block(self, table: pa.Table, origin: Origin, duplicates: Duplicates | None = None) -> Block:
        """Checks and converts all rows of a table.

        Args:
            table: the columns of `contract.needed_columns`, of types that `contract.check_schema` accepted.
            origin: where the table comes from.
            duplicates: of the source that it comes from; None looks within the table.

        Raises:
            DataError: a bad row, unless the policy is to leave them out.
        """
        cells = self._cells(table)
        findings = self._check(table, cells)
        self._check_repeats(findings, table, origin, duplicates)
        if self.pipeline.data.bad_rows.policy != pb.BadRows.SKIP:
            findings.raise_first(origin.path, origin.first_row)
        good = findings.codes == 0
        left = table
        if not good.all():
            left = table.filter(pa.array(good))
            cells = self._cells(left)
        flat = {name: to_flat(one, self._mapping(name)) for name, one in cells.items()}
        if self._unknown_rates:
            self._show_unknown(flat, cells, origin, np.flatnonzero(good))
        spans = self._spans(cells, left.num_rows)
        kept = {side: places(one.starts, one.lengths) for side, one in spans.items()}
        if self.mode == "train" and self.pipeline.data.HasField("stochastic_length"):
            events = flat[UIH_TIMESTAMPS].values
            self._thin_out(spans, kept, events, self._draws(_LENGTH, origin, np.flatnonzero(good)))
        for name, column in flat.items():
            if column.side in kept:
                flat[name] = pick(column, kept[column.side])
            else:
                flat[name] = _spread_user(column, good)
        return Block(
            file=np.full(table.num_rows, origin.file, np.int64),
            row=origin.first_row + np.arange(table.num_rows),
            codes=findings.codes,
            group=_spread(self._group(left), good),
            lengths={side: _spread(one.lengths, good) for side, one in spans.items()},
            cut={side: _spread(one.cut, good) for side, one in spans.items()},
            flat=flat,
            keys=table.select(list(self.pipeline.data.key_columns)) if self.mode != "train" else None,
        )

    def _cells(self, table: pa.Table) -> dict[str, Cells]:
        found = {}
        for field in self._fields:
            if field.column in table.column_names:
                found[field.column] = cells_of(table, field)
        return found

    def _check(self, table: pa.Table, cells: dict[str, Cells]) -> Findings:
        findings = Findings(table.num_rows)
        first: dict[int, Cells] = {}
        for one in cells.values():
            row_checks.check_nulls(findings, one, one_array(table[one.field.column]))
            row_checks.check_values(findings, one)
            if one.field.side != pb.USER:
                row_checks.check_ragged(findings, one, first.setdefault(one.field.side, one))
        for field in self._fields:
            # Tasks may share a column, and `cells` knows it as that of the last one.
            if field.kind is Kind.LABEL and cells[field.column].field is not field:
                shared = cells[field.column]
                row_checks.check_label(findings, Cells(field, shared.lists, shared.values))
        request_time = row_checks.integers(cells[REQUEST_TIME].values)
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
        self, findings: Findings, table: pa.Table, origin: Origin, duplicates: Duplicates | None
    ) -> None:
        if duplicates is None:
            keys = self.pipeline.data.key_columns
            if keys:
                row_checks.check_repeats(findings, table.select(list(dict.fromkeys([*keys, REQUEST_TIME]))))
            return
        rows, places = duplicates.of_table(origin.file, origin.first_row, table.num_rows)
        findings.add("duplicate_key", rows, lambda i: f"has the key of {duplicates.first(int(places[i]))}.")

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
        elif self._rule.targets and self.pipeline.model.max_seq_len:
            max_seq_len = self.pipeline.model.max_seq_len
            before = self._rule.num_contextual + self._rule.tokens_per_event * events
            most, setting = max_seq_len - before, f"model.max_seq_len is {max_seq_len}"
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

    def _spans(self, cells: dict[str, Cells], num_rows: int) -> dict[int, _Spans]:
        """What is kept of the lists of each row."""
        data = self.pipeline.data
        events, candidates = cells[UIH_TIMESTAMPS].lists[0], _candidates(cells)
        kept = np.minimum(events.lengths, data.max_history_len)
        # Of a history the newest events are kept, of candidates the first.
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

    def _mapping(self, column: str) -> Mapping | None:
        return self.mappings.get(self._tables.get(column))

    def _show_unknown(
        self, flat: dict[str, Flat], cells: dict[str, Cells], origin: Origin, rows: np.ndarray
    ) -> None:
        """Sets a share of the ids to row 0, so that it is trained."""
        state = self._draws(_UNKNOWN, origin, rows)
        for name, rate in self._unknown_rates.items():
            if name in cells:
                hidden = draw_places(
                    cells[name].row_offsets(len(rows)), rate, state ^ self._name_hashes[name]
                )
                flat[name].values[hidden] = 0

    def _thin_out(
        self,
        spans: dict[int, _Spans],
        kept: dict[int, np.ndarray | slice],
        timestamps: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Leaves events out of what is kept of the histories."""
        data, span, events = self.pipeline.data, spans[pb.HISTORY], kept[pb.HISTORY]
        drawn = thin_out(data.stochastic_length, data.max_history_len, span.lengths, timestamps[events], rows)
        whole = isinstance(events, slice)
        kept[pb.HISTORY] = drawn.places + events.start if whole else events[drawn.places]
        spans[pb.HISTORY] = span._replace(lengths=drawn.lengths)

    def _draws(self, stream: int, origin: Origin, rows: np.ndarray) -> np.ndarray:
        """uint64, a hash of each of `rows` (places in the table) for one purpose."""
        return combine(self.pipeline.train.seed, origin.epoch, stream, origin.file, origin.first_row + rows)

    def _group(self, table: pa.Table) -> np.ndarray:
        name = group_column(self.pipeline)
        if name is None:
            return np.zeros(table.num_rows, np.int64)
        return row_checks.key_hash(one_array(table[name]))


def cells_of(table: pa.Table, field: Field) -> Cells:
    """The values of one column of a table, with the lists around them."""
    column, lists = one_array(table[field.column]), ()
    for _ in range(field.depth):
        lists = (*lists, Lists.of(column))
        column = lists[-1].values
    return Cells(field, lists, _plain(column))


def to_flat(cells: Cells, mapping: Mapping | None) -> Flat:
    """Checked values as numpy arrays: ids as rows of their table, numbers scaled.

    Args:
        cells: of one column.
        mapping: of its table; None for a column without one.
    """
    field, values = cells.field, cells.values
    offsets = cells.lists[-1].offsets if field.multi_valued else None
    if field.kind is Kind.ID:
        return Flat(field.side, mapping.map(values, row_type(mapping.rows)), offsets)
    if field.kind in (Kind.LABEL, Kind.WATCH_TIME):
        return Flat(field.side, row_checks.floats(values).astype(np.float32, copy=False))
    if field.kind is not Kind.NUMBER:
        return Flat(field.side, _narrow(row_checks.integers(values)))
    numeric = field.feature.numeric
    numbers = row_checks.floats(values)
    if values.null_count:
        nulls = pc.is_null(values).to_numpy(zero_copy_only=False)
        numbers = np.where(nulls, numeric.fill, numbers.astype(np.float64, copy=False))
    if numeric.HasField("bucketize"):
        return Flat(field.side, mapping.map(numbers, np.int32))
    return Flat(field.side, normalize(numbers, numeric.normalize))


def _narrow(values: np.ndarray) -> np.ndarray:
    """int32 where that is enough: half the bytes to move for each row that is picked."""
    if len(values) and (values.min() < _INT32.min or values.max() > _INT32.max):
        return values
    return values.astype(np.int32)


def _unknown_rates(fields_read: list[Field]) -> dict[str, float]:
    ids = {field.column: field.feature.id for field in fields_read if field.kind is Kind.ID}
    rates = {name: one.vocabulary.unknown_rate for name, one in ids.items() if one.HasField("vocabulary")}
    return {name: rate for name, rate in rates.items() if rate > 0}


def _spread(values: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Values of the good rows, with zeros for the others between them."""
    if len(values) == len(good):
        return values
    spread = np.zeros(len(good), values.dtype)
    spread[good] = values
    return spread


def _spread_user(column: Flat, good: np.ndarray) -> Flat:
    if column.side != pb.USER:
        return column
    if column.offsets is None:
        return column._replace(values=_spread(column.values, good))
    return column._replace(offsets=offsets_of(_spread(np.diff(column.offsets), good)))


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
