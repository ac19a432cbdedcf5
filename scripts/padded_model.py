"""The reference of `bench_cpu.py`: a model of this package that computes on padded tensors.

Every row of a batch is padded to the batch's longest history and its largest number of candidates. Layers
that read single tokens run on all of them, and attention runs on [B, H, L, L] scores under a mask that is
made once per batch. Losses are computed at real positions only. So loss and gradients are those of the
jagged model, and only the time differs.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.models import Model
from recsys.models.base import Losses
from recsys.models.tasks import TaskOutputs
from recsys.modules.mixers import HstuMixer
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout
from recsys.ops.jagged.mask import visible_pairs
from recsys.ops.relative_bias import dense_bias, relative_positions


class Side(NamedTuple):
    """Events or candidates, padded to `width` per row; `places`, int64 [n], locates the real ones."""

    rows: int
    width: int
    places: Tensor

    def fill(self, values: Tensor, filling: Tensor | int = 0) -> Tensor:
        """Pads [n] to [rows * width] with `filling`, a number or [rows, 1]."""
        filled = values.new_zeros(self.rows, self.width) + filling
        return filled.flatten().scatter(0, self.places, values)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch with padded rows, and the batch that it was made of.

    Attributes:
        batch: the padded batch.
        original: the batch without padding.
        events, candidates: positions of the original's events and candidates in the padded batch.
        first: int64 [B], place of each row's first real event; None if padding follows the events.
    """

    batch: Batch
    original: Batch
    events: Side
    candidates: Side
    first: Tensor | None


def pad(batch: Batch, pipeline: pb.Pipeline) -> PaddedBatch:
    """Pads a batch with unknown items at its request times; padding follows the real candidates.

    A model with targets in its sequence counts positions from the end of the history, so padding precedes the
    history. Other models count from the start, so padding follows it.
    """
    has_targets = model_of(pipeline).has_targets
    first = int(batch.uih_lengths.max()) - batch.uih_lengths if has_targets else None
    events = _side(batch.uih_lengths, first)
    candidates = _side(batch.num_candidates, None)
    columns = {column.name: column for column in features.columns(pipeline)}
    sides = {
        name: events if column.side == pb.HISTORY else candidates
        for name, column in columns.items()
        if column.side in (pb.HISTORY, pb.CANDIDATE)
    }

    def fill_all(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: sides[name].fill(x) if name in sides else x for name, x in values.items()}

    single = {name: side for name, side in sides.items() if not columns[name].multi_valued}
    asked = batch.request_time[:, None]
    num_targets = torch.full_like(batch.num_candidates, candidates.width if has_targets else 0)
    contextual = batch.layout.num_contextual
    filled = replace(
        batch,
        layout=SequenceLayout(contextual + events.width + num_targets, num_targets, contextual),
        uih_lengths=torch.full_like(batch.uih_lengths, events.width),
        num_candidates=torch.full_like(batch.num_candidates, candidates.width),
        ids=_fill_ids(batch.ids, single),
        value_counts=fill_all(batch.value_counts),
        numbers=fill_all(batch.numbers),
        uih_timestamps=events.fill(batch.uih_timestamps, asked),
        uih_actions=events.fill(batch.uih_actions),
        uih_watch_time=events.fill(batch.uih_watch_time),
        candidate_timestamps=candidates.fill(batch.candidate_timestamps, asked),
        labels={name: candidates.fill(values) for name, values in batch.labels.items()},
    )
    return PaddedBatch(filled, batch, events, candidates, first)


class JaggedModel(nn.Module):
    """A model and its objective."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Losses:
        """Returns the objective of a batch."""
        return self.model.objective(self.model(batch), batch)


class PaddedModel(nn.Module):
    """A copy of an HSTU model that computes on padded batches, with the same loss.

    Raises:
        TypeError: the model has another mixer.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model = deepcopy(model)
        mixer = self.model.get_submodule("mix")
        if not isinstance(mixer, HstuMixer):
            raise TypeError(
                f"the padded form of HstuMixer is implemented, not that of {type(mixer).__name__}"
            )
        if len(set(mixer.rules)) > 1 or mixer.rules[0].tail_len is not None:
            raise TypeError("only the padded form of a stack with one mask and no truncation is implemented")
        self.attention = PaddedAttention(mixer.rules[0].mask, mixer.scale_len)
        mixer._attend = self.attention.of_layer

    def forward(self, padded: PaddedBatch) -> Losses:
        """Returns the objective of the original batch."""
        self.attention.look_at(padded)
        outputs = self.model(padded.batch)
        if isinstance(outputs, TaskOutputs):
            outputs = replace(outputs, logits=outputs.logits[padded.candidates.places])
        else:
            outputs = replace(outputs, queries=outputs.queries[padded.events.places])
        return self.model.objective(outputs, padded.original)


class PaddedAttention:
    """`hstu_attention` for rows that are equally long: reshaped, not gathered."""

    def __init__(self, mask: AttentionMask, scale_len: float):
        self.mask, self.scale_len = mask, scale_len

    def look_at(self, padded: PaddedBatch) -> None:
        """Makes the mask of a batch, for all layers."""
        layout = padded.batch.layout
        self.shape = (layout.batch_size, layout.max_len)
        end = torch.tensor([layout.num_contextual + padded.events.width])
        visible = visible_pairs(self.mask, end, layout.num_contextual, layout.max_len)
        position = torch.arange(layout.max_len)
        self.relative = relative_positions(position, end[:, None], self.mask.target_group_size)
        if padded.first is not None:
            contextual, first = position < layout.num_contextual, padded.first[:, None]
            real = contextual | (position >= layout.num_contextual + first)
            visible = visible & real[:, None, :]
            self.relative = torch.where(contextual, position, self.relative - first)
        hidden = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min / 4)
        self.hidden = hidden[:, None]  # [B or 1, 1, L, L]

    def of_layer(
        self, layout: SequenceLayout, mask: AttentionMask, bias: RelativeBias | None
    ) -> Callable[..., Tensor]:
        """Replaces `HstuMixer._attend`: returns the attention of one layer as a function of q, k and v."""
        return partial(self, bias=bias)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, bias: RelativeBias | None) -> Tensor:
        """Maps q and k [B * L, H, D] and values [B * L, H, V] to [B * L, H, V]."""
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        offset = self.hidden
        if bias is not None:
            times = (x.view(self.shape) for x in (bias.next_timestamps, bias.timestamps))
            # Tables come as [1 or H, B, L, L].
            offset = dense_bias(bias, self.relative, self.relative, *times).transpose(0, 1) + offset
        mixed = F.silu(scores.add_(offset)) @ v
        return mixed.transpose(1, 2).flatten(0, 1) / self.scale_len


def _side(lengths: Tensor, first: Tensor | None) -> Side:
    """Lays out lists of the given lengths in rows as long as the longest, each starting at `first`."""
    rows, width = len(lengths), int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    inside = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    begin = torch.arange(rows) * width + (0 if first is None else first)
    return Side(rows, width, begin.repeat_interleave(lengths) + inside)


def _fill_ids(ids: KeyedJaggedTensor, sides: dict[str, Side]) -> KeyedJaggedTensor:
    """Pads ids with row 0 of the tables, the unknown id. Other columns do not change."""
    values, lengths = [], []
    for key in ids.keys():
        column, side = ids[key], sides.get(key)
        values.append(side.fill(column.values()) if side else column.values())
        lengths.append(torch.full_like(column.lengths(), side.width) if side else column.lengths())
    return KeyedJaggedTensor(
        keys=ids.keys(), values=torch.cat(values), lengths=torch.cat(lengths), stride=len(lengths[0])
    )
