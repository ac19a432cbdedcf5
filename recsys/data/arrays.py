"""From a block of converted rows to the arrays of one batch, which a reader process sends.

Runs in the reader processes; `collate` makes a `Batch` of the arrays in the training process. A row that was
left out stays in its batch as a filler row (no events, no candidates, weight 0), so a batch has the rows of
its plan.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsys import features
from recsys import protos as pb
from recsys.data.block import Block, Flat, offsets_of
from recsys.data.channels import select
from recsys.data.checks import REASONS
from recsys.data.columns import (
    CANDIDATE_TIMESTAMPS,
    REQUEST_TIME,
    UIH_ACTIONS,
    UIH_TIMESTAMPS,
    UIH_WATCH_TIME,
)
from recsys.data.contract import Field, Kind, Mode, fields
from recsys.data.counts import TRUNCATED_CANDIDATES, TRUNCATED_HISTORY
from recsys.data.layout_rule import LayoutRule
from recsys.data.slots import Slot, SlotReader, SlotWriter


@dataclass
class Arrays:
    """One batch as numpy arrays; fields as in `Batch`.

    `id_values` and `id_lengths` go column by column, in the order of `features.columns`. `counts` holds the
    rows left out by reason (checks.REASONS) and those that were cut (TRUNCATED_HISTORY,
    TRUNCATED_CANDIDATES). `channel_lengths` are int64 [rows], events of each row in a channel.
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
    channel_events: dict[str, np.ndarray]
    channel_lengths: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    sample_weight: np.ndarray
    group: np.ndarray
    file: np.ndarray
    row: np.ndarray
    keys: pa.Table | None
    counts: Counter[str]

    def packed(self, slots: SlotWriter | None = None) -> "Packed":
        """The same in a form that travels between processes cheaply, in one of `slots` if one is free."""
        parts, others = [], {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                parts.append((name, None, value))
            elif isinstance(value, dict) and not isinstance(value, Counter):
                parts += [(name, key, one) for key, one in value.items()]
                others[name] = {}
            else:
                others[name] = value
        places, end = [], 0
        for name, key, value in parts:
            places.append(_Place(name, key, value.dtype.str, end, value.nbytes))
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = np.empty(end, np.uint8)
        for place, (_, _, value) in zip(places, parts, strict=True):
            buffer[place.start : place.start + place.size] = np.ascontiguousarray(value).view(np.uint8)
        slot = slots.put(buffer) if slots else None
        return Packed(slot or buffer, places, others)


_ALIGNMENT = 8


class _Place(NamedTuple):
    """Where an array lies in the buffer: its field, its key when that is a dict, type, first byte, bytes."""

    field: str
    key: str | None
    dtype: str
    start: int
    size: int


class Packed(NamedTuple):
    """`Arrays` in one buffer: a queue between processes is slow with many small objects."""

    buffer: np.ndarray | Slot
    places: list[_Place]
    others: dict[str, Any]

    def arrays(self, slots: SlotReader | None = None) -> Arrays:
        """The arrays again, as views of a buffer of this process; `slots` is where a slot is looked up."""
        buffer = self.buffer
        if isinstance(buffer, Slot):
            if slots is None:
                raise ValueError("the batch lies in shared memory: a SlotReader is needed to take it out")
            buffer = slots.take(buffer)
        found = dict(self.others)
        for place in self.places:
            value = buffer[place.start : place.start + place.size].view(place.dtype)
            if place.key is None:
                found[place.field] = value
            else:
                found[place.field] = {**found[place.field], place.key: value}
        return Arrays(**found)


class Packer:
    """Makes arrays for one config."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode) -> None:
        self._columns = features.columns(pipeline)
        self._channels = rule.channels
        self._fields = fields(pipeline, mode)

    def pack(self, block: Block) -> Arrays:
        """The arrays of a batch of all rows of a block."""
        num_rows, flat = len(block.row), block.flat
        lengths = {pb.USER: np.ones(num_rows, np.int64), **block.lengths}
        ids = [_ids(column, flat, lengths[column.side]) for column in self._columns if column.table]
        request_time = flat[REQUEST_TIME].values
        candidate_times = flat.get(CANDIDATE_TIMESTAMPS)
        actions = _events(flat, UIH_ACTIONS, np.int64)
        watch_time = _events(flat, UIH_WATCH_TIME, np.float32)
        channels = {one.name: select(one, actions, watch_time, lengths[pb.HISTORY]) for one in self._channels}
        return Arrays(
            uih_lengths=lengths[pb.HISTORY],
            num_candidates=lengths[pb.CANDIDATE],
            id_values=np.concatenate([values for values, _ in ids] or [np.empty(0, np.int64)]),
            id_lengths=np.concatenate([counts for _, counts in ids] or [np.empty(0, np.int64)]),
            value_counts={
                c.name: np.diff(_get(flat, c, np.int64).offsets) for c in self._columns if c.multi_valued
            },
            numbers={c.name: _get(flat, c, np.float32).values for c in self._columns if c.table is None},
            request_time=request_time,
            uih_timestamps=flat[UIH_TIMESTAMPS].values,
            uih_actions=actions,
            uih_watch_time=watch_time,
            candidate_timestamps=(
                candidate_times.values if candidate_times else np.repeat(request_time, lengths[pb.CANDIDATE])
            ),
            channel_events={name: one.events for name, one in channels.items()},
            channel_lengths={name: one.lengths for name, one in channels.items()},
            labels={
                field.task.name: _labels(field.task, flat[field.column].values)
                for field in self._fields
                if field.task is not None
            },
            sample_weight=((block.codes == 0) & (block.row >= 0)).astype(np.float32),
            group=block.group,
            file=block.file,
            row=block.row,
            # A slice would be sent to the other process with all of its table.
            keys=block.keys.take(pa.array(np.arange(num_rows))) if block.keys is not None else None,
            counts=_count(block),
        )

    def filler(self, num_rows: int) -> Arrays:
        """A batch of `num_rows` filler rows, for a rank that has run out of rows before the others."""
        zeros, nowhere = np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64)
        return self.pack(
            Block(
                file=nowhere,
                row=nowhere,
                codes=zeros.astype(np.int8),
                group=zeros,
                lengths={pb.HISTORY: zeros, pb.CANDIDATE: zeros},
                cut={pb.HISTORY: zeros > 0, pb.CANDIDATE: zeros > 0},
                flat={field.column: _nothing(field, num_rows) for field in self._fields},
            )
        )


def _events(flat: dict[str, Flat], name: str, dtype: type) -> np.ndarray:
    """A column of events; zeros when nobody looks at it."""
    return flat[name].values if name in flat else np.zeros(len(flat[UIH_TIMESTAMPS].values), dtype)


def _ids(
    column: features.Column, flat: dict[str, Flat], elements: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Table rows of one column, and how many of them each row of the batch has; `elements` is lists'
    lengths."""
    if column.name not in flat:
        return np.empty(0, np.int64), np.zeros(len(elements), np.int64)
    _, values, offsets = flat[column.name]
    return values, elements if offsets is None else np.diff(offsets[offsets_of(elements)])


def _get(flat: dict[str, Flat], column: features.Column, dtype: type) -> Flat:
    # Candidates of a retriever are only read for evaluation.
    return flat.get(column.name, Flat(column.side, np.empty(0, dtype), np.zeros(1, np.int64)))


def _labels(task: pb.Task, values: np.ndarray) -> np.ndarray:
    """float32 labels of a task, from its column."""
    if not task.label_bits:
        return values
    mask = sum(1 << bit for bit in set(task.label_bits))
    return ((values & mask) != 0).astype(np.float32)


def _count(block: Block) -> Counter[str]:
    by_code = np.bincount(block.codes, minlength=len(REASONS) + 1)[1:].tolist()
    counts = Counter(dict(zip(REASONS, by_code, strict=True)))
    counts[TRUNCATED_HISTORY] = int(block.cut[pb.HISTORY].sum())
    counts[TRUNCATED_CANDIDATES] = int(block.cut[pb.CANDIDATE].sum())
    return +counts


def _nothing(field: Field, num_rows: int) -> Flat:
    real = field.kind in (Kind.LABEL, Kind.WATCH_TIME)
    if field.kind is Kind.NUMBER:
        real = not field.feature.numeric.HasField("bucketize")
    elements = num_rows if field.side == pb.USER else 0
    values = np.zeros(0 if field.multi_valued else elements, np.float32 if real else np.int64)
    return Flat(field.side, values, np.zeros(elements + 1, np.int64) if field.multi_valued else None)
