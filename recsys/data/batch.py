"""Defines `Batch`, the rows of one step as tensors: the reader makes it and every model takes it.

The reader computes everything that a forward pass needs on the host (totals, maxima, the position in the
data), so no module waits for the device. Shapes name B rows, U history events, N candidates and T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data.convert.packer import BatchArrays
from recsys.data.counts import Counts
from recsys.data.schema.layout_rule import Channel, LayoutRule
from recsys.data.transfer import to_device
from recsys.ops import SequenceLayout

__all__ = ["Batch", "Channel", "LayoutRule", "Position", "Rows"]


@dataclass(frozen=True)
class Position:
    """The position of a training step in the data.

    `index` is the last batch of the epoch's plan that any rank holds. All ranks have the same position, and
    reading continues at `index + 1`. Checkpoints store both numbers.
    """

    epoch: int = 0
    index: int = 0


@dataclass
class Rows:
    """The origin of a batch's rows, which stays on the host.

    Attributes:
        file: [B] int64 index into the source's list of files; -1 in a batch that has only filler rows.
        row: [B] int64 row within the file; -1 in a batch that has only filler rows.
        keys: the key columns, unchanged from the file, B rows; None in training.
        counts: numbers of rows that were left out or cut.
    """

    file: Tensor
    row: Tensor
    keys: pa.Table | None = None
    counts: Counts = Counts()


@dataclass
class Batch(Pipelineable):
    """The rows of one step as tensors.

    Attributes:
        layout: contextual, history and (for ranking) target tokens of each row.
        channel_layout: the layouts of all channels, joined into one; None without channels.
        channel_events: by channel, int64 indices of its events among the U events.
        channel_lengths: by channel, [B] int64 number of its events in each row.
        uih_lengths: [B] int64 number of events.
        num_candidates: [B] int64 number of candidates.
        ids: every embedded column, with the keys of `features.columns`; values are rows of embedding tables,
            lengths are numbers of ids per row. The last keys are `features.shared_columns`, the negatives
            that all rows share, and the columns of side ITEM, the features of these negatives; each row
            holds an equal part of their values.
        value_counts: by multi-valued column, int64 number of ids of each row, event, candidate or negative.
        numbers: by plain numeric column, transformed float32 numbers, one per row, event, candidate or
            negative; for sampled negatives with logQ also `log_weights`.
        request_time: [B] int64 seconds.
        uih_timestamps: [U] int64 seconds.
        uih_actions: [U] int64 bitmask; zeros if no action encoder reads it.
        uih_watch_time: [U] float32 seconds; zeros if no action encoder reads it.
        candidate_timestamps: [N] int64 seconds, the request time of each candidate.
        labels: by task name, [N] float32.
        sample_weight: [B] float32; 0 marks a filler row that keeps ranks in step.
        weights: by column, float32 weights of losses, one per row, event or candidate.
        group: [B] int64 hash of the row's user, for per-user metrics; 0 if the config names no key column.
        seen: int64 items of each row's whole history, also beyond `data.max_history_len`, as rows of the item
            table; empty unless the model removes seen items from its results.
        seen_layout: the layout of `seen` over rows.
        repeated: [N] bool, True for a candidate that is among its row's `seen`.
        position: the batch's position in the data.
        rows: the origin of the batch's rows.
        arrays: the numbers of the tensors, on the host; None in a batch that no reader made.
    """

    layout: SequenceLayout
    uih_lengths: Tensor
    num_candidates: Tensor
    ids: KeyedJaggedTensor
    value_counts: dict[str, Tensor]
    numbers: dict[str, Tensor]
    request_time: Tensor
    uih_timestamps: Tensor
    uih_actions: Tensor
    uih_watch_time: Tensor
    candidate_timestamps: Tensor
    labels: dict[str, Tensor]
    sample_weight: Tensor
    group: Tensor
    seen: Tensor | None = None
    seen_layout: SequenceLayout | None = None
    repeated: Tensor | None = None
    channel_layout: SequenceLayout | None = None
    channel_events: dict[str, Tensor] = field(default_factory=dict)
    channel_lengths: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    rows: Rows | None = None
    arrays: BatchArrays | None = None

    @property
    def sequences(self) -> SequenceLayout:
        """Layout of the tokens that layers mix: `channel_layout` if there are channels, else `layout`."""
        return self.layout if self.channel_layout is None else self.channel_layout

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copies the batch to `device`, all tensors in one transfer; `rows` and `arrays` stay on the host."""
        tensors: list[Tensor] = []
        self._map(lambda x: tensors.append(x) or x)
        if torch.device(device).type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
            copies = [tensor.to(device=device, non_blocking=non_blocking) for tensor in tensors]
        else:
            copies = to_device(tensors, torch.device(device), non_blocking)
        remaining = iter(copies)
        return self._map(lambda _: next(remaining))

    def pin_memory(self) -> "Batch":
        """Copies the batch to page-locked memory, which a GPU can copy from without blocking the host."""
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of all tensors until `stream` has used them."""
        pieces: dict[int, Tensor] = {}
        self._map(lambda x: pieces.setdefault(x.untyped_storage().data_ptr(), x))
        for tensor in pieces.values():
            tensor.record_stream(stream)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Returns the batch with `function` of every tensor, which is called in the order of the fields."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, dict):
                changed[item.name] = {key: function(tensor) for key, tensor in value.items()}
            elif isinstance(value, SequenceLayout):
                changed[item.name] = value.map_tensors(function)
            elif isinstance(value, KeyedJaggedTensor):
                changed[item.name] = _mapped_ids(value, function)
            elif isinstance(value, Tensor):
                changed[item.name] = function(value)
        return replace(self, **changed)


def _mapped_ids(ids: KeyedJaggedTensor, function: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=function(ids.values()),
        lengths=function(ids.lengths()),
        stride=ids.stride(),
        length_per_key=ids.length_per_key(),
    )
