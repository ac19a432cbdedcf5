"""A batch of rows as tensors: what the reader makes and every model takes.

Everything that a forward pass needs to know on the host (totals, maxima, the position in the data) was
computed in the reader, so no module waits for the device. B rows, U history events, N candidates, T tokens.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data.counts import Counts
from recsys.data.schema.layout_rule import Channel, LayoutRule
from recsys.ops import SequenceLayout

__all__ = ["Batch", "Channel", "LayoutRule", "Position", "Rows"]


@dataclass(frozen=True)
class Position:
    """Where in the data a step stands: `index` is the last batch of the epoch's plan that a rank holds in it.

    All ranks carry the same position, and reading goes on at `index + 1`.
    """

    epoch: int = 0
    index: int = 0


@dataclass
class Rows:
    """Where rows came from; stays on the host.

    Attributes:
        file: [B] int64 index into the source's list of files; -1 in a batch of nothing but filler rows.
        row: [B] int64 row within the file; -1 likewise.
        keys: the key columns as they stand in the file, B rows; None in training.
        counts: how many of them were left out or cut.
    """

    file: Tensor
    row: Tensor
    keys: pa.Table | None = None
    counts: Counts = Counts()


@dataclass
class Batch(Pipelineable):
    """One batch.

    Attributes:
        layout: contextual, history and (for ranking) target tokens of each row.
        channel_layout: the same of each channel's events, joined over channels, when the model has channels.
        channel_events: by channel, int64 places of its events among the U.
        channel_lengths: by channel, [B] int64 events of each row in it.
        uih_lengths: [B] int64 events of each row.
        num_candidates: [B] int64 candidates of each row.
        ids: every embedded column, keys by `features.columns`; values are rows of the tables, lengths count
            ids of each row. A retriever's also has `features.shared_columns`, items that all rows share, and
            the columns of side ITEM, what is known of these items, in that order; all lie in row 0.
        value_counts: for multi-valued columns, int64 ids of each row / event / candidate / shared item.
        numbers: for plain numeric columns, float32 one a row / event / candidate / shared item, transformed;
            and perhaps `log_weights` of the shared items.
        request_time: [B] int64 seconds.
        uih_timestamps: [U] int64 seconds.
        uih_actions: [U] int64 bitmask; zeros when no action encoder looks at it.
        uih_watch_time: [U] float32 seconds; zeros when no action encoder looks at it.
        candidate_timestamps: [N] int64 seconds, the request time of each candidate.
        labels: by task name, [N] float32.
        sample_weight: [B] float32; 0 marks a filler row that keeps ranks in step.
        group: [B] int64 user of a row, for per-user metrics; 0 when the config names no key column.
        position: where in the data the batch stands.
        rows: where its rows came from.
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
    channel_layout: SequenceLayout | None = None
    channel_events: dict[str, Tensor] = field(default_factory=dict)
    channel_lengths: dict[str, Tensor] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    rows: Rows | None = None

    @property
    def sequences(self) -> SequenceLayout:
        """The tokens that layers mix: `channel_layout` when there are channels, else `layout`."""
        return self.layout if self.channel_layout is None else self.channel_layout

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """A copy on `device`; `rows` stays on the host."""
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which copies to a GPU do not block."""
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of all tensors until `stream` has used them."""

        def record(x: Any) -> Any:
            x.record_stream(stream)
            return x

        self._map(record)

    def _map(self, function) -> "Batch":
        changed = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, dict):
                changed[item.name] = {key: function(tensor) for key, tensor in value.items()}
            elif not is_dataclass(value) or isinstance(value, SequenceLayout):
                if value is not None:
                    changed[item.name] = function(value)
        return replace(self, **changed)
