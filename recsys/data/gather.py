"""From converted row groups to the numpy arrays of one batch.

Runs in the reader processes behind `columns`; `collate` makes a `Batch` of the arrays in the training
process. A row that was left out stays in its batch as a filler row (no events, no candidates, weight 0), so a
batch has the rows of its plan.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from recsys import features
from recsys import protos as pb
from recsys.data.checks import REASONS
from recsys.data.columns import (
    CANDIDATE_TIMESTAMPS,
    REQUEST_TIME,
    UIH_ACTIONS,
    UIH_TIMESTAMPS,
    UIH_WATCH_TIME,
    Block,
    Flat,
    Spans,
)
from recsys.data.contract import Field, Kind, Mode, fields
from recsys.data.hashing import combine, hash_text, mix

TRUNCATED_HISTORY = "truncated_history"
TRUNCATED_CANDIDATES = "truncated_candidates"

_UNKNOWN = 3
"""Stream of the hash that draws what is shown as unknown; the plan has 1 and 2."""


@dataclass
class Arrays:
    """One batch as numpy arrays; fields as in `Batch`.

    `id_values` and `id_lengths` go column by column, in the order of `features.columns`. `counts` holds the
    rows left out by reason (checks.REASONS) and those that were cut (TRUNCATED_HISTORY,
    TRUNCATED_CANDIDATES).
    """

    uih_lengths: np.ndarray
    num_candidates: np.ndarray
    id_values: np.ndarray
    id_lengths: np.ndarray
    value_counts: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    request_time: np.ndarray
    uih_timestamps: np.ndarray
    uih_actions: np.ndarray
    uih_watch_time: np.ndarray
    candidate_timestamps: np.ndarray
    labels: dict[str, np.ndarray]
    sample_weight: np.ndarray
    group: np.ndarray
    file: np.ndarray
    row: np.ndarray
    keys: pa.Table | None
    counts: Counter[str]


class Gatherer:
    """Picks rows out of blocks, for one config."""

    def __init__(self, pipeline: pb.Pipeline, mode: Mode) -> None:
        self._columns = features.columns(pipeline)
        self._fields = fields(pipeline, mode)
        self._seed = pipeline.train.seed
        self._unknown_rates = _unknown_rates(self._columns) if mode == "train" else {}

    def gather(self, parts: list[tuple[Block, np.ndarray]], epoch: int = 0) -> Arrays:
        """The arrays of a batch.

        Args:
            parts: blocks, and int64 rows of each.
            epoch: decides, with `train.seed`, which ids are shown as unknown in training.
        """
        picked = [_Picked(block, rows) for block, rows in parts]
        rows = _Rows.of(picked)
        flat = {field.column: _join([part.take(field) for part in picked]) for field in self._present(picked)}
        self._show_unknown(flat, rows, epoch)
        ids = [self._ids(column, flat, rows) for column in self._columns if column.table]
        request_time = flat[REQUEST_TIME].values
        num_events = len(flat[UIH_TIMESTAMPS].values)
        repeated = np.repeat(request_time, rows.lengths[pb.CANDIDATE])
        plain = [column for column in self._columns if column.table is None]
        return Arrays(
            uih_lengths=rows.lengths[pb.HISTORY],
            num_candidates=rows.lengths[pb.CANDIDATE],
            id_values=np.concatenate([one.values for one in ids] or [np.empty(0, np.int64)]),
            id_lengths=np.concatenate([one.counts for one in ids] or [np.empty(0, np.int64)]),
            value_counts={
                c.name: _get(flat, c.name, np.int64).counts for c in self._columns if c.multi_valued
            },
            numbers={c.name: _get(flat, c.name, np.float32).values for c in plain},
            request_time=request_time,
            uih_timestamps=flat[UIH_TIMESTAMPS].values,
            uih_actions=flat.get(UIH_ACTIONS, Flat(np.zeros(num_events, np.int64))).values,
            uih_watch_time=flat.get(UIH_WATCH_TIME, Flat(np.zeros(num_events, np.float32))).values,
            candidate_timestamps=flat.get(CANDIDATE_TIMESTAMPS, Flat(repeated)).values,
            labels={
                field.task.name: flat[field.column].values
                for field in self._fields
                if field.kind is Kind.LABEL
            },
            sample_weight=rows.weight,
            group=rows.group,
            file=rows.file,
            row=rows.row,
            keys=rows.keys,
            counts=rows.counts,
        )

    def filler(self, num_rows: int) -> Arrays:
        """A batch of `num_rows` filler rows, for a rank that has run out of rows before the others."""
        left_out = np.full(num_rows, -1, np.int64)
        nothing = np.empty(0, np.int64)
        sides = (pb.HISTORY, pb.CANDIDATE)
        block = Block(
            file=-1,
            first_row=0,
            codes=np.zeros(num_rows, np.int8),
            place=left_out,
            spans={side: Spans(nothing, nothing) for side in sides},
            flat={field.column: _nothing(field) for field in self._fields},
            truncated=dict.fromkeys(sides, nothing > 0),
            group=nothing,
            keys=None,
        )
        return replace(self.gather([(block, np.arange(num_rows))]), row=left_out)

    def _present(self, picked: list["_Picked"]) -> list[Field]:
        return [field for field in self._fields if field.column in picked[0].block.flat]

    def _ids(self, column: features.Column, flat: dict[str, Flat], rows: "_Rows") -> Flat:
        """Table rows of one column, and how many of them each row of the batch has."""
        if column.name not in flat:
            return Flat(np.empty(0, np.int64), np.zeros(len(rows.row), np.int64))
        values, counts = flat[column.name]
        lengths = rows.lengths[column.side]
        return Flat(values, lengths if counts is None else _sums(counts, lengths))

    def _show_unknown(self, flat: dict[str, Flat], rows: "_Rows", epoch: int) -> None:
        """Sets a share of the ids to row 0, drawn by what and where they are, so a resumed run draws the
        same."""
        if not self._unknown_rates:
            return
        state = combine(self._seed, epoch, _UNKNOWN, rows.file, rows.row)
        for column in self._columns:
            rate = self._unknown_rates.get(column.name, 0)
            if rate <= 0 or column.name not in flat:
                continue
            counts = self._ids(column, flat, rows).counts
            ends = np.cumsum(counts)
            values = flat[column.name].values
            place = (np.arange(len(values)) - np.repeat(ends - counts, counts)).astype(np.uint64)
            name = hash_text(pa.array([column.name]))
            draws = mix(np.repeat(mix(state ^ name), counts) ^ place) >> np.uint64(11)
            flat[column.name] = Flat(np.where(draws * 2.0**-53 < rate, 0, values), flat[column.name].counts)


class _Picked:
    """Rows of one block: which elements of its columns they are."""

    def __init__(self, block: Block, rows: np.ndarray) -> None:
        self.block = block
        self.rows = rows
        place = block.place[rows]
        self.kept = place >= 0
        self.place = place[self.kept]
        self.lengths: dict[int, np.ndarray] = {}
        self._elements: dict[int, np.ndarray | slice] = {pb.USER: _narrow(self.place)}
        for side in (pb.HISTORY, pb.CANDIDATE):
            starts, lengths = block.spans[side].starts[self.place], block.spans[side].lengths[self.place]
            self.lengths[side] = self.spread(lengths)
            self._elements[side] = _elements(starts, lengths)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values of the kept rows, with zeros for the others between them."""
        if len(values) == len(self.rows):
            return values
        spread = np.zeros(len(self.rows), values.dtype)
        spread[self.kept] = values
        return spread

    def take(self, field: Field) -> Flat:
        """The field's values for these rows."""
        column = self.block.flat[field.column]
        elements = self._elements[field.side]
        if column.counts is None:
            values = column.values[elements]
            return Flat(self.spread(values) if field.side == pb.USER else values)
        counts = column.counts[elements]
        starts = (np.cumsum(column.counts) - column.counts)[elements]
        values = column.values[_elements(starts, counts)]
        return Flat(values, self.spread(counts) if field.side == pb.USER else counts)


@dataclass
class _Rows:
    """What a batch knows of its rows besides their columns."""

    lengths: dict[int, np.ndarray]
    weight: np.ndarray
    group: np.ndarray
    file: np.ndarray
    row: np.ndarray
    keys: pa.Table | None
    counts: Counter[str]

    @classmethod
    def of(cls, picked: list[_Picked]) -> "_Rows":
        counts: Counter[str] = Counter()
        for part in picked:
            codes, times = np.unique(part.block.codes[part.rows], return_counts=True)
            counts.update(
                {REASONS[code - 1]: n for code, n in zip(codes.tolist(), times.tolist(), strict=True) if code}
            )
            for name, side in ((TRUNCATED_HISTORY, pb.HISTORY), (TRUNCATED_CANDIDATES, pb.CANDIDATE)):
                counts[name] += int(part.block.truncated[side][part.place].sum())
        lengths = {
            side: np.concatenate([part.lengths[side] for part in picked])
            for side in (pb.HISTORY, pb.CANDIDATE)
        }
        row = np.concatenate([part.block.first_row + part.rows for part in picked])
        lengths[pb.USER] = np.ones(len(row), np.int64)
        keys = [part.block.keys.take(pa.array(part.rows)) for part in picked if part.block.keys is not None]
        return cls(
            lengths=lengths,
            weight=np.concatenate([part.kept.astype(np.float32) for part in picked]),
            group=np.concatenate([part.spread(part.block.group[part.place]) for part in picked]),
            file=np.concatenate([np.full(len(part.rows), part.block.file, np.int64) for part in picked]),
            row=row,
            keys=pa.concat_tables(keys).combine_chunks() if keys else None,
            counts=+counts,
        )


def _unknown_rates(columns: list[features.Column]) -> dict[str, float]:
    vocabularies = {c.name: c.feature.id for c in columns if c.feature.id.HasField("vocabulary")}
    return {name: config.vocabulary.unknown_rate for name, config in vocabularies.items()}


def _elements(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | slice:
    """Flat places of runs; a slice when they follow each other without a gap, which costs no copy."""
    if len(starts) and (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _narrow(places: np.ndarray) -> np.ndarray | slice:
    return _elements(places, np.ones(len(places), np.int64))


def _nothing(field: Field) -> Flat:
    real = field.kind in (Kind.LABEL, Kind.WATCH_TIME)
    if field.kind is Kind.NUMBER:
        real = not field.feature.numeric.HasField("bucketize")
    counts = np.empty(0, np.int64) if field.multi_valued else None
    return Flat(np.empty(0, np.float32 if real else np.int64), counts)


def _sums(counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of consecutive runs of `counts`, a run of lengths[i] each; empty runs give 0."""
    totals = np.concatenate([[0], np.cumsum(counts)])
    ends = np.cumsum(lengths)
    return totals[ends] - totals[ends - lengths]


def _join(parts: list[Flat]) -> Flat:
    # Also of a single part: a batch owns its memory, a block is used again.
    counts = None if parts[0].counts is None else np.concatenate([part.counts for part in parts])
    return Flat(np.concatenate([part.values for part in parts]), counts)


def _get(flat: dict[str, Flat], name: str, dtype: type) -> Flat:
    # Candidates of a retriever are only read for evaluation.
    return flat.get(name, Flat(np.empty(0, dtype), np.empty(0, np.int64)))
