"""Selects and joins rows of `BatchArrays`, so that ranks can exchange rows of batches that they have read."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.column_block import flat_indices, offsets_of
from recsys.data.convert.packer import BatchArrays
from recsys.data.schema.contract import Kind, Mode, file_columns

_BY_ROW = ("uih_lengths", "num_candidates", "request_time", "seen_lengths")
_BY_ROW += ("sample_weight", "group", "file", "row")
_BY_EVENT = ("uih_timestamps", "uih_actions", "uih_watch_time")
_BY_CANDIDATE = ("candidate_timestamps", "repeated")


class BatchRows:
    """Knows which row each element of a config's `BatchArrays` belongs to.

    Args:
        pipeline: resolved.
        mode: purpose of the batches. Key columns are not supported, so it is not "predict".
    """

    def __init__(self, pipeline: pb.Pipeline, mode: Mode) -> None:
        columns = features.columns(pipeline)
        self._num_keys = sum(column.table is not None for column in columns)
        self._widths = {column.name: math.prod(column.batch_shape) for column in columns}
        in_file = file_columns(pipeline, mode)
        self._sides = {
            "value_counts": {column.name: column.side for column in columns},
            "numbers": {column.name: column.side for column in columns},
            "labels": {column.task.name: column.side for column in in_file if column.task is not None},
            "weights": {column.name: column.side for column in in_file if column.kind is Kind.WEIGHT},
        }

    def select(self, arrays: BatchArrays, rows: np.ndarray) -> BatchArrays:
        """Returns the rows of a batch, int64 [n], in the given order; `counts` of the result is empty."""
        changed: dict[str, Any] = {"counts": Counter(), "channel_events": {}}
        for name, key, lengths in self._lengths(arrays):
            starts = offsets_of(lengths)[:-1]
            array = getattr(arrays, name) if key is None else getattr(arrays, name)[key]
            chosen = array[flat_indices(starts[rows], lengths[rows])] if len(array) else array
            if key is None:
                changed[name] = chosen
            else:
                changed.setdefault(name, {})[key] = chosen
        num_rows = len(arrays.row)
        lengths = arrays.id_lengths.reshape(self._num_keys, num_rows)
        starts = offsets_of(arrays.id_lengths)[:-1].reshape(self._num_keys, num_rows)
        changed["id_lengths"] = lengths[:, rows].reshape(-1)
        elements = flat_indices(starts[:, rows].reshape(-1), changed["id_lengths"])
        changed["id_values"] = arrays.id_values[elements]
        first = offsets_of(arrays.uih_lengths)[:-1]
        moved = offsets_of(arrays.uih_lengths[rows])[:-1] - first[rows]
        for channel, events in arrays.channel_events.items():
            lengths = arrays.channel_lengths[channel]
            elements = flat_indices(offsets_of(lengths)[:-1][rows], lengths[rows])
            changed["channel_events"][channel] = events[elements] + np.repeat(moved, lengths[rows])
        return replace(arrays, **changed)

    def join(self, parts: Sequence[BatchArrays]) -> BatchArrays:
        """Joins the rows of batches, at least one, in new memory; `counts` of the result is that of all."""
        changed: dict[str, Any] = {"counts": sum((part.counts for part in parts), Counter())}
        for item in fields(BatchArrays):
            values = [getattr(part, item.name) for part in parts]
            if isinstance(values[0], np.ndarray):
                changed[item.name] = np.concatenate(values)
            elif item.name not in ("counts", "keys"):
                changed[item.name] = {
                    key: np.concatenate([value[key] for value in values]) for key in values[0]
                }
        lengths = [part.id_lengths.reshape(self._num_keys, -1) for part in parts]
        ends = [np.cumsum(part_lengths.sum(axis=1))[:-1] for part_lengths in lengths]
        by_key = [np.split(part.id_values, end) for part, end in zip(parts, ends, strict=True)]
        changed["id_lengths"] = np.concatenate(lengths, axis=1).reshape(-1)
        changed["id_values"] = np.concatenate([ids for key in zip(*by_key, strict=True) for ids in key])
        first = offsets_of(np.array([len(part.uih_timestamps) for part in parts]))
        for channel in parts[0].channel_events:
            changed["channel_events"][channel] = np.concatenate(
                [part.channel_events[channel] + start for part, start in zip(parts, first, strict=False)]
            )
        return replace(parts[0], **changed)

    def _lengths(self, arrays: BatchArrays) -> Iterator[tuple[str, str | None, np.ndarray]]:
        """Yields the fields whose elements follow the rows in order, with the number of each row's elements.

        For a field that is a dict, it yields one key after the other; the key is None for other fields.
        """
        each = np.ones(len(arrays.row), np.int64)
        sides = {pb.USER: each, pb.HISTORY: arrays.uih_lengths, pb.CANDIDATE: arrays.num_candidates}
        for names, side in ((_BY_ROW, pb.USER), (_BY_EVENT, pb.HISTORY), (_BY_CANDIDATE, pb.CANDIDATE)):
            for name in names:
                yield name, None, sides[side]
        yield "seen", None, arrays.seen_lengths
        for channel in arrays.channel_lengths:
            yield "channel_lengths", channel, each
        for name, side_of in self._sides.items():
            for key in getattr(arrays, name):
                width = self._widths[key] if name == "numbers" else 1
                yield name, key, sides[side_of[key]] * width
