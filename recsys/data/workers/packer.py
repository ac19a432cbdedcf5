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

from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.block import Block, Flat, offsets_of
from recsys.data.convert.channels import select
from recsys.data.convert.converter import (
    CANDIDATE_TIMESTAMPS,
    REQUEST_TIME,
    UIH_ACTIONS,
    UIH_TIMESTAMPS,
    UIH_WATCH_TIME,
)
from recsys.data.convert.row_checks import REASONS
from recsys.data.counts import TRUNCATED_CANDIDATES, TRUNCATED_HISTORY
from recsys.data.schema.contract import Field, Kind, Mode, fields
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.workers.slots import Slot, SlotReader, SlotWriter


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


_ALIGNMENT = 64
_SENT_AS = {np.dtype(np.int32): np.dtype(np.int64)}
"""Tensors of integers are int64."""


class Packed(NamedTuple):
    """`Arrays` on their way between processes, in one buffer: a pipe is slow with many small objects.

    Attributes:
        buffer: all arrays, or where they are.
        places: of each array its field, its key when that is a dict, type, first byte, and bytes.
        others: the fields without arrays.
    """

    buffer: np.ndarray | Slot
    places: list[tuple[str, str | None, str, int, int]]
    others: dict[str, Any]

    def arrays(self, slots: SlotReader | None = None) -> Arrays:
        """The arrays again, as views of one buffer; `slots` is where a slot is looked up."""
        buffer = self.buffer
        if isinstance(buffer, Slot):
            if slots is None:
                raise ValueError("the batch lies in shared memory: a SlotReader is needed to take it out")
            buffer = slots.take(buffer)
        found = {name: {} if type(value) is dict else value for name, value in self.others.items()}
        for field, key, dtype, start, size in self.places:
            value = buffer[start : start + size].view(dtype)
            if key is None:
                found[field] = value
            else:
                found[field][key] = value
        return Arrays(**found)


class Packer:
    """Makes arrays for one config."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode) -> None:
        self._columns = features.columns(pipeline)
        self._channels = rule.channels
        self._fields = fields(pipeline, mode)

    def pack(self, block: Block) -> Arrays:
        """The arrays of a batch of all rows of a block, in memory of their own."""
        return self.packed(block).arrays()

    def packed(self, block: Block, slots: SlotWriter | None = None) -> Packed:
        """The same in a form that travels between processes cheaply, in one of `slots` if one is free."""
        return _packed(self._pieces(block), slots)

    def _pieces(self, block: Block) -> dict[str, Any]:
        """The fields of `Arrays`: integers may be int32 here, and what a list has goes end to end."""
        num_rows, flat = len(block.row), block.flat
        lengths = {pb.USER: np.ones(num_rows, np.int64), **block.lengths}
        ids = [_ids(column, flat, lengths[column.side]) for column in self._columns if column.table]
        request_time = flat[REQUEST_TIME].values
        candidate_times = flat.get(CANDIDATE_TIMESTAMPS)
        actions = _events(flat, UIH_ACTIONS, np.int64)
        watch_time = _events(flat, UIH_WATCH_TIME, np.float32)
        masks = actions.astype(np.int64, copy=False)
        channels = {one.name: select(one, masks, watch_time, lengths[pb.HISTORY]) for one in self._channels}
        return {
            "uih_lengths": lengths[pb.HISTORY],
            "num_candidates": lengths[pb.CANDIDATE],
            "id_values": [values for values, _ in ids],
            "id_lengths": [counts for _, counts in ids],
            "value_counts": {
                c.name: np.diff(_get(flat, c, np.int64).offsets) for c in self._columns if c.multi_valued
            },
            "numbers": {c.name: _get(flat, c, np.float32).values for c in self._columns if c.table is None},
            "request_time": request_time,
            "uih_timestamps": flat[UIH_TIMESTAMPS].values,
            "uih_actions": actions,
            "uih_watch_time": watch_time,
            "candidate_timestamps": (
                candidate_times.values if candidate_times else np.repeat(request_time, lengths[pb.CANDIDATE])
            ),
            "channel_events": {name: one.events for name, one in channels.items()},
            "channel_lengths": {name: one.lengths for name, one in channels.items()},
            "labels": {
                field.task.name: _labels(field.task, flat[field.column].values)
                for field in self._fields
                if field.task is not None
            },
            "sample_weight": ((block.codes == 0) & (block.row >= 0)).astype(np.float32),
            "group": block.group,
            "file": block.file,
            "row": block.row,
            # A slice would be sent to the other process with all of its table.
            "keys": block.keys.take(pa.array(np.arange(num_rows))) if block.keys is not None else None,
            "counts": _count(block),
        }

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


def _packed(pieces: dict[str, Any], slots: SlotWriter | None) -> Packed:
    parts, others = [], {}
    for name, value in pieces.items():
        if isinstance(value, np.ndarray):
            parts.append((name, None, [value]))
        elif isinstance(value, list):
            parts.append((name, None, value or [np.empty(0, np.int64)]))
        elif type(value) is dict:
            parts += [(name, key, [one]) for key, one in value.items()]
            others[name] = {}
        else:
            others[name] = value
    places, end = [], 0
    for name, key, values in parts:
        dtype = _SENT_AS.get(values[0].dtype, values[0].dtype)
        size = sum(map(len, values)) * dtype.itemsize
        places.append((name, key, dtype.str, end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    reserved = slots.reserve(end) if slots else None
    buffer = reserved.memory if reserved else np.empty(end, np.uint8)
    for (_, _, dtype, start, size), (_, _, values) in zip(places, parts, strict=True):
        # This is the one copy between a block and the training process.
        np.concatenate(values, out=buffer[start : start + size].view(dtype))
    return Packed(reserved.slot if reserved else buffer, places, others)


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
    # A model may read candidates for evaluation only.
    return flat.get(column.name, Flat(column.side, np.empty(0, dtype), np.zeros(1, np.int64)))


def _labels(task: pb.Task, values: np.ndarray) -> np.ndarray:
    """float32 labels of a task, from its column."""
    if not task.label_bits:
        return values
    mask = sum(1 << bit for bit in set(task.label_bits))
    return ((values.astype(np.int64, copy=False) & mask) != 0).astype(np.float32)


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
