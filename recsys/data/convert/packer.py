"""Makes the arrays of one batch from a block of converted rows.

This runs in the reader processes; `collator` turns the arrays into a `Batch` in the training process. A row
that was left out stays in its batch as a filler row (no events, no candidates, weight 0), so a batch always
has as many rows as the plan says.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.convert.channels import select
from recsys.data.convert.column_block import ColumnBlock, FlatColumn, counts_of, offsets_of
from recsys.data.convert.converter import (
    CANDIDATE_TIMESTAMPS,
    REQUEST_TIME,
    UIH_ACTIONS,
    UIH_TIMESTAMPS,
    UIH_WATCH_TIME,
)
from recsys.data.convert.row_checks import REASONS
from recsys.data.counts import REPEATED_TARGETS, TRUNCATED_CANDIDATES, TRUNCATED_HISTORY
from recsys.data.schema.contract import FileColumn, Kind, Mode, file_columns
from recsys.data.schema.layout_rule import LayoutRule


@dataclass
class BatchArrays:
    """One batch as numpy arrays. The fields have the meaning that `Batch` gives them.

    `id_values` and `id_lengths` hold one column after the other, in the order of `features.columns`.
    `numbers` are flat, also those of features with several numbers. `counts` holds the numbers of rows left
    out, by reason (row_checks.REASONS), of rows cut (TRUNCATED_HISTORY, TRUNCATED_CANDIDATES), and of
    repeated targets (REPEATED_TARGETS). `channel_lengths` holds, by channel, the number of events of each
    row, int64 [rows].
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
    seen: np.ndarray
    seen_lengths: np.ndarray
    repeated: np.ndarray
    labels: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    sample_weight: np.ndarray
    group: np.ndarray
    file: np.ndarray
    row: np.ndarray
    keys: pa.Table | None
    counts: Counter[str]


_ALIGNMENT = 64
_SENT_AS = {np.dtype(np.int32): np.dtype(np.int64)}
"""Types that packing converts: integer tensors are int64."""


class Packed(NamedTuple):
    """`BatchArrays` in one buffer, because a pipe between processes is slow with many small objects.

    Attributes:
        buffer: uint8, all arrays one after the other. Between processes `workers` may put a `Slot` of shared
            memory in its place.
        layout: for each array its field, key (if the field is a dict), dtype, first byte and number of bytes.
        plain_fields: the fields without arrays.
    """

    buffer: Any
    layout: list[tuple[str, str | None, str, int, int]]
    plain_fields: dict[str, Any]

    def arrays(self) -> BatchArrays:
        """Returns the arrays as views of the buffer."""
        fields = {name: {} if type(value) is dict else value for name, value in self.plain_fields.items()}
        for field, key, dtype, start, size in self.layout:
            value = self.buffer[start : start + size].view(dtype)
            if key is None:
                fields[field] = value
            else:
                fields[field][key] = value
        return BatchArrays(**fields)


def allocate_bytes(num_bytes: int) -> np.ndarray:
    """Allocates a uint8 array in this process."""
    return np.empty(num_bytes, np.uint8)


class Packer:
    """Makes the arrays of batches for one config."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode) -> None:
        self._columns = features.columns(pipeline)
        self._channels = rule.channels
        self._in_file = file_columns(pipeline, mode)
        item = model_of(pipeline).item_feature
        self._target = None if item is None else features.PREFIX[pb.CANDIDATE] + item

    def pack(self, block: ColumnBlock) -> BatchArrays:
        """Makes a batch of all rows of a block, in new memory."""
        return _packed(self._pieces(block), allocate_bytes).arrays()

    def packed(self, block: ColumnBlock, allocate: Callable[[int], np.ndarray] = allocate_bytes) -> Packed:
        """Makes the arrays of `pack` in one buffer, to be sent to another process.

        Args:
            block: the rows of the batch.
            allocate: returns a uint8 array of a number of bytes.
        """
        packed = _packed(self._pieces(block), allocate)
        if block.keys is not None:
            # Copied, because a slice would be sent to the other process with its whole table.
            packed.plain_fields["keys"] = block.keys.take(pa.array(np.arange(len(block.row))))
        return packed

    def _pieces(self, block: ColumnBlock) -> dict[str, Any]:
        """Makes the fields of `BatchArrays` before integers are cast and lists of arrays are joined."""
        num_rows, flat = len(block.row), block.flat
        lengths = {pb.USER: np.ones(num_rows, np.int64), **block.lengths}
        ids = [_ids(column, flat, lengths[column.side]) for column in self._columns if column.table]
        request_time = flat[REQUEST_TIME].values
        candidate_times = flat.get(CANDIDATE_TIMESTAMPS)
        actions = _events(flat, UIH_ACTIONS, np.int64)
        watch_time = _events(flat, UIH_WATCH_TIME, np.float32)
        masks = actions.astype(np.int64, copy=False)
        channels = {
            channel.name: select(channel, masks, watch_time, lengths[pb.HISTORY])
            for channel in self._channels
        }
        seen, seen_lengths = _seen(flat, num_rows)
        repeated = self._repeated(flat, seen, seen_lengths, lengths[pb.CANDIDATE])
        return {
            "uih_lengths": lengths[pb.HISTORY],
            "num_candidates": lengths[pb.CANDIDATE],
            "id_values": [values for values, _ in ids],
            "id_lengths": [counts for _, counts in ids],
            "value_counts": {
                c.name: counts_of(_get(flat, c, np.int64).offsets) for c in self._columns if c.multi_valued
            },
            "numbers": {
                c.name: _get(flat, c, np.float32).values.reshape(-1) for c in self._columns if c.table is None
            },
            "request_time": request_time,
            "uih_timestamps": flat[UIH_TIMESTAMPS].values,
            "uih_actions": actions,
            "uih_watch_time": watch_time,
            "candidate_timestamps": (
                candidate_times.values if candidate_times else np.repeat(request_time, lengths[pb.CANDIDATE])
            ),
            "channel_events": {name: channel.events for name, channel in channels.items()},
            "channel_lengths": {name: channel.lengths for name, channel in channels.items()},
            "seen": seen,
            "seen_lengths": seen_lengths,
            "repeated": repeated,
            "labels": {
                column.task.name: _labels(column.task, flat[column.name].values)
                for column in self._in_file
                if column.task is not None
            },
            "weights": {
                column.name: flat[column.name].values
                for column in self._in_file
                if column.kind is Kind.WEIGHT
            },
            "sample_weight": ((block.codes == 0) & (block.row >= 0)).astype(np.float32),
            "group": block.group,
            "file": block.file,
            "row": block.row,
            "keys": block.keys,
            "counts": _count(block, repeated),
        }

    def _repeated(
        self, flat: dict[str, FlatColumn], seen: np.ndarray, seen_lengths: np.ndarray, num_targets: np.ndarray
    ) -> np.ndarray:
        """Marks the targets that are among their row's seen items, bool [candidates]."""
        if not len(seen) or self._target not in flat:
            return np.zeros(num_targets.sum(), bool)
        target = flat[self._target].values.astype(np.int64)
        rows, keys = np.arange(len(num_targets)), 1 + max(int(seen.max()), int(target.max(initial=0)))
        seen_keys = np.repeat(rows, seen_lengths) * keys + seen
        return (target > 0) & np.isin(np.repeat(rows, num_targets) * keys + target, seen_keys)

    def filler(self, num_rows: int) -> BatchArrays:
        """Makes a batch of filler rows, for a rank that runs out of rows before the others."""
        zeros, nowhere = np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64)
        return self.pack(
            ColumnBlock(
                file=nowhere,
                row=nowhere,
                codes=zeros.astype(np.int8),
                group=zeros,
                lengths={pb.HISTORY: zeros, pb.CANDIDATE: zeros},
                cut={pb.HISTORY: zeros > 0, pb.CANDIDATE: zeros > 0},
                flat={
                    column.name: _empty_column(column, num_rows)
                    for column in self._in_file
                    if column.kind is not Kind.FEATURE
                }
                | {column.name: _empty_feature(column, num_rows) for column in self._columns},
            )
        )


def _packed(pieces: dict[str, Any], allocate: Callable[[int], np.ndarray]) -> Packed:
    """Copies all arrays into one buffer."""
    parts, plain_fields = [], {}
    for name, value in pieces.items():
        if isinstance(value, np.ndarray):
            parts.append((name, None, [value]))
        elif isinstance(value, list):
            parts.append((name, None, value or [np.empty(0, np.int64)]))
        elif type(value) is dict:
            parts += [(name, key, [array]) for key, array in value.items()]
            plain_fields[name] = {}
        else:
            plain_fields[name] = value
    layout, end = [], 0
    for name, key, values in parts:
        dtype = _SENT_AS.get(values[0].dtype, values[0].dtype)
        size = sum(map(len, values)) * dtype.itemsize
        layout.append((name, key, dtype.str, end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer = allocate(end)
    for (_, _, dtype, start, size), (_, _, values) in zip(layout, parts, strict=True):
        # This is the only copy between a block and the training process.
        np.concatenate(values, out=buffer[start : start + size].view(dtype))
    return Packed(buffer, layout, plain_fields)


def _events(flat: dict[str, FlatColumn], name: str, dtype: type) -> np.ndarray:
    """Returns a column of events, or zeros if the config does not read it."""
    return flat[name].values if name in flat else np.zeros(len(flat[UIH_TIMESTAMPS].values), dtype)


def _ids(
    column: features.Column, flat: dict[str, FlatColumn], elements: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the table rows of one column, and the number of them in each row of the batch.

    Args:
        column: an embedded column.
        flat: the columns that were read.
        elements: int64 [rows], events or candidates of each row; 1 for side USER.
    """
    if column.name not in flat:
        return np.empty(0, np.int64), np.zeros(len(elements), np.int64)
    _, values, offsets = flat[column.name]
    return values, elements if offsets is None else counts_of(offsets[offsets_of(elements)])


def _get(flat: dict[str, FlatColumn], column: features.Column, dtype: type) -> FlatColumn:
    # A model may read candidates only for evaluation; in training it then has no such columns.
    return flat.get(column.name, FlatColumn(column.side, np.empty(0, dtype), np.zeros(1, np.int64)))


def _labels(task: pb.Task, values: np.ndarray) -> np.ndarray:
    """Returns the float32 labels of a task from its column, which may be a bit mask."""
    if not task.label_bits:
        return values
    mask = sum(1 << bit for bit in set(task.label_bits))
    return ((values.astype(np.int64, copy=False) & mask) != 0).astype(np.float32)


def _seen(flat: dict[str, FlatColumn], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seen items of all rows and their number in each row; empty if none are removed."""
    if features.SEEN not in flat:
        return np.empty(0, np.int64), np.zeros(num_rows, np.int64)
    _, values, offsets = flat[features.SEEN]
    return values, counts_of(offsets)


def _count(block: ColumnBlock, repeated: np.ndarray) -> Counter[str]:
    """Counts the rows that were left out or cut, by reason, and repeated targets."""
    counts: Counter[str] = Counter()
    if block.codes.any():
        by_code = np.bincount(block.codes, minlength=len(REASONS) + 1)[1:].tolist()
        counts.update(dict(zip(REASONS, by_code, strict=True)))
    counts[TRUNCATED_HISTORY] = int(block.cut[pb.HISTORY].sum())
    counts[TRUNCATED_CANDIDATES] = int(block.cut[pb.CANDIDATE].sum())
    counts[REPEATED_TARGETS] = int(repeated.sum())
    return +counts


def _empty_column(column: FileColumn, num_rows: int) -> FlatColumn:
    """Makes a column of rows without events and candidates; zeros for side USER."""
    real = column.kind in (Kind.LABEL, Kind.WATCH_TIME, Kind.WEIGHT)
    elements = num_rows if column.side == pb.USER else 0
    return FlatColumn(column.side, np.zeros(elements, np.float32 if real else np.int64))


def _empty_feature(column: features.Column, num_rows: int) -> FlatColumn:
    """Makes a feature of rows without events and candidates; zeros for side USER."""
    elements = num_rows if column.side == pb.USER else 0
    if column.table is None:
        return FlatColumn(column.side, np.zeros((elements, *column.batch_shape), np.float32))
    values = np.zeros(0 if column.multi_valued else elements, np.int64)
    return FlatColumn(column.side, values, np.zeros(elements + 1, np.int64) if column.multi_valued else None)
