"""Records the attention weights of a few samples during an ordinary forward pass.

While the block of `AttentionRecorder.watching` runs, queries and keys of some samples are copied out of the
first and the last call of an attention op. The weights are then computed from the formulas of `recsys.ops`,
whichever kernel ran. The model is not involved.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.data.batch import Batch
from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention import OP as HSTU_ATTENTION
from recsys.ops.jagged.layout import TARGET, UIH
from recsys.ops.jagged.mask import row_intervals
from recsys.ops.relative_bias import RelativeBias, dense_bias, relative_positions
from recsys.ops.softmax_attention import OP as SOFTMAX_ATTENTION

log = logging.getLogger(__name__)

MOST_TOKENS = 256
"""A picture shows at most this many tokens of a sample."""


@dataclass(frozen=True, eq=False)
class AttentionPicture:
    """Attention weights of one sample in one layer, mean over heads, on the host.

    Attributes:
        sample: the sample's name, such as its key columns.
        layer, num_layers: the layer's number, from 1, and the number of layers.
        formula: how a weight follows from a score, as text.
        weights: float32 [n queries, n keys]; 0 where the mask hides the key.
        visible: bool [n queries, n keys], whether the query sees the key.
        kinds: int8 [n], as `SequenceLayout.kinds`.
        num_tokens: length of the sample's sequence. If it exceeds n, the picture leaves out the middle: see
            `shown_tokens`.
    """

    sample: str
    layer: int
    num_layers: int
    formula: str
    weights: Tensor
    visible: Tensor
    kinds: Tensor
    num_tokens: int


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one call of an attention op, without its values.

    Attributes:
        q, k: queries and keys [T, H, D].
        layout, mask: as passed to the op.
        alpha: factor of the scores.
        scale_len: divisor of SiLU weights; None means softmax.
        bias: the relative bias that is added to the scores, if any.
    """

    q: Tensor
    k: Tensor
    layout: SequenceLayout
    mask: AttentionMask
    alpha: float
    scale_len: float | None = None
    bias: RelativeBias | None = None

    def sample(self, number: int) -> "AttentionCall":
        """Returns the call restricted to sample `number`, in float32 on the host."""
        layout = self.layout.on_host()
        rows = slice(int(layout.offsets[number]), int(layout.offsets[number + 1]))
        sample = slice(number, number + 1)
        return replace(
            self,
            q=_to_host(self.q[rows]),
            k=_to_host(self.k[rows]),
            layout=SequenceLayout(layout.lengths[sample], layout.num_targets[sample], layout.num_contextual),
            bias=None if self.bias is None else _bias_of(self.bias, rows),
        )


class AttentionRecorder:
    """Takes pictures of a few samples of one batch.

    Args:
        batch: its rows are the samples to choose from.
        max_rows: the largest number of pictures per layer.
    """

    def __init__(self, batch: Batch, max_rows: int):
        self._rows = _choose(batch, max_rows)
        self._names = [_name(batch, row) for row in self._rows]
        self._calls: list[list[AttentionCall]] = []
        self._num_layers = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records attention calls in this block, which holds one forward pass over the batch."""
        with HSTU_ATTENTION.watched(self._see), SOFTMAX_ATTENTION.watched(self._see):
            yield

    def pictures(self) -> list[AttentionPicture]:
        """Returns pictures of the first and the last layer. If no call was recorded, logs why; returns []."""
        if not self._rows:
            log.info("no pictures of attention: the first evaluated batch has no row with a history")
        elif not self._calls:
            log.info("no pictures of attention: the model called no attention op")
        numbers = [1, self._num_layers][: len(self._calls)]
        return [
            _picture(call, name, layer, self._num_layers)
            for layer, calls in zip(numbers, self._calls, strict=True)
            for name, call in zip(self._names, calls, strict=True)
        ]

    def _see(self, **arguments: Any) -> None:
        call = AttentionCall(**arguments)
        self._num_layers += 1
        # A layout with several channels starts with the first channel of all rows, so `row` picks that
        # channel.
        self._calls = [*self._calls[:1], [call.sample(row) for row in self._rows]]


def attention_weights(call: AttentionCall, rows: Tensor) -> Tensor:
    """Returns the weights [H, n, L] that tokens `rows` (int64 [n]) of a one-sample call give to all L tokens.

    The formulas are those of `hstu_attention` and `softmax_attention`.
    """
    scores = call.alpha * torch.einsum("qhd,khd->hqk", call.q[rows], call.k)
    if call.bias is not None:
        end = call.layout.history_end
        place = relative_positions(call.layout.positions(), end, call.mask.target_group_size)[None]
        times = call.bias.next_timestamps[rows][None], call.bias.timestamps[None]
        scores = scores + dense_bias(call.bias, place[:, rows], place, *times)[:, 0]
    visible = visible_keys(call, rows)
    if call.scale_len is None:
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=2)
    return (F.silu(scores) / call.scale_len).masked_fill(~visible, 0)


def visible_keys(call: AttentionCall, rows: Tensor) -> Tensor:
    """Returns which of the L tokens of a one-sample call its tokens `rows` (int64 [n]) see, bool [n, L]."""
    layout = call.layout
    intervals = row_intervals(call.mask, rows, layout.history_end, layout.num_contextual)
    return intervals.contain(layout.positions())


def shown_tokens(layout: SequenceLayout, max_tokens: int = MOST_TOKENS) -> Tensor:
    """Returns the tokens that a picture of a one-sample layout shows, int64 [n] with n <= `max_tokens`.

    If not all tokens fit, the picture shows the first contextual tokens and the first targets, at most
    `max_tokens` // 4 of each, and the newest events.
    """
    if layout.total_len <= max_tokens:
        return torch.arange(layout.total_len)
    kinds = layout.kinds()
    history, targets = (kinds == UIH).nonzero()[:, 0], (kinds == TARGET).nonzero()[:, 0]
    contextual = torch.arange(layout.num_contextual)[: max_tokens // 4]
    targets = targets[: max_tokens // 4]
    room = max_tokens - len(contextual) - len(targets)
    return torch.cat([contextual, history[max(len(history) - room, 0) :], targets])


def _picture(call: AttentionCall, name: str, layer: int, num_layers: int) -> AttentionPicture:
    shown = shown_tokens(call.layout)
    softmax = call.scale_len is None
    return AttentionPicture(
        sample=name,
        layer=layer,
        num_layers=num_layers,
        formula="softmax(scores)" if softmax else f"silu(scores) / {call.scale_len:g}",
        weights=attention_weights(call, shown).mean(0)[:, shown],
        visible=visible_keys(call, shown)[:, shown],
        kinds=call.layout.kinds()[shown],
        num_tokens=call.layout.total_len,
    )


def _choose(batch: Batch, max_rows: int) -> list[int]:
    """Picks rows of different users, spread from short histories to the longest one."""
    lengths, groups, weights = (x.tolist() for x in (batch.uih_lengths, batch.group, batch.sample_weight))
    users: dict[int, int] = {}
    for row, (length, group, weight) in enumerate(zip(lengths, groups, weights, strict=True)):
        if length and weight:
            users.setdefault(group if any(groups) else row, row)
    by_length = sorted(users.values(), key=lengths.__getitem__)
    count = min(max_rows, len(by_length))
    return [by_length[(number + 1) * len(by_length) // count - 1] for number in range(count)]


def _name(batch: Batch, row: int) -> str:
    keys = batch.rows.keys if batch.rows is not None else None
    if keys is None or not keys.num_columns:
        return f"row {row + 1}"
    return ", ".join(f"{name} {keys[name][row].as_py()}" for name in keys.column_names)


def _bias_of(bias: RelativeBias, rows: slice) -> RelativeBias:
    return RelativeBias(
        _to_host(bias.position_table),
        _to_host(bias.time_table),
        bias.timestamps[rows].cpu(),
        bias.next_timestamps[rows].cpu(),
    )


def _to_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32)
