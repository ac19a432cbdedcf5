"""Defines `AttentionMask`: who sees whom inside a sample. Every other form of the mask follows this
definition.

For tokens `i` (query) and `j` (key) of one sample `[C contextual | U uih | N targets]`:

| query `i` | sees |
| --- | --- |
| contextual | every contextual token; every history token if `contextual_reads_history`; no target |
| history | every contextual token; history `j <= i` with `i - j < window` or `j - C < prefix`; no target |
| target | itself; every contextual token; every history token; earlier tokens of its own target group |

With `target_window` a target sees only the last `window` and the first `prefix` history tokens.

`hstu_attention/mask_forms.py` has the forms that kernels use; one test compares all of them with the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout


@dataclass(frozen=True)
class AttentionMask:
    """Rule of who sees whom inside a sample, as the table in this module's docstring defines it.

    A token always sees itself, and contextual tokens never fall out of a window.

    Attributes:
        window: number of history tokens that a history token sees, including itself; None for no limit.
        prefix: number of first history tokens, which stay visible outside the window.
        target_window: whether window and prefix also apply to targets. Without a window it has no effect.
        target_group_size: number of targets that form a group; within a group they are causal.
        contextual_reads_history: must be False where a history position is itself a query with a loss;
            otherwise the future leaks into the past through the contextual tokens.

    Raises:
        TypeError, ValueError: naming the field.
    """

    window: int | None = None
    prefix: int = 0
    target_window: bool = False
    target_group_size: int = 1
    contextual_reads_history: bool = True

    def __post_init__(self) -> None:
        for name, minimum in (("window", 1), ("prefix", 0), ("target_group_size", 1)):
            value = getattr(self, name)
            if name == "window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"{name} must be an int{' or None' * (name == 'window')}, got {type(value).__name__}"
                )
            if value < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {value}")
        for name in ("target_window", "contextual_reads_history"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")

    def history_can_grow(self, num_contextual: int) -> bool:
        """Return True if tokens see the same keys as before when events are appended to the history.

        Contextual tokens that read the history change with it; so do, one layer above, the rows of all
        events, because they see the contextual tokens.
        """
        return num_contextual == 0 or not self.contextual_reads_history


class KeyIntervals(NamedTuple):
    """Keys that each row sees, as three disjoint, ascending, half-open intervals; some may be empty."""

    start: Tensor  # int64 [T, 3], positions in the row's sample
    end: Tensor  # int64 [T, 3], >= start

    def contain(self, key: Tensor) -> Tensor:
        """Return bool [..., Q, K]: whether rows with intervals [..., Q, 3] see the keys at `key`, int64 [...,
        K]."""
        key = key.unsqueeze(-2)
        parts = zip(self.start.unbind(-1), self.end.unbind(-1), strict=True)
        first, middle, last = ((key >= start[..., None]) & (key < end[..., None]) for start, end in parts)
        return first | middle | last


def dense_mask(mask: AttentionMask, layout: SequenceLayout) -> Tensor:
    """Return bool [B, max_len, max_len]: whether token i (dim 1) sees token j (dim 2); False in the
    padding."""
    visible = visible_pairs(mask, layout.history_end, layout.num_contextual, layout.max_len)
    return visible & layout.padded_index().valid[:, :, None]


def visible_pairs(mask: AttentionMask, history_end: Tensor, num_contextual: int, max_len: int) -> Tensor:
    """Return bool [b, max_len, max_len], visible pairs in samples whose first target is at position
    `history_end`, int64 [b].

    A row past the end of its sample is treated as one more target, so it is not empty either; no row of the
    sample sees such a position.
    """
    position = torch.arange(max_len, device=history_end.device)
    i, j = position[:, None], position
    end = history_end[:, None, None]

    # Rules that are equal in all samples. Row i is treated as a contextual or history token here.
    contextual_key = j < num_contextual
    in_prefix = j < num_contextual + mask.prefix
    in_window = in_prefix | (i - j < mask.window) if mask.window is not None else True
    history_row = contextual_key | ((j <= i) & in_window)
    contextual_row = torch.ones_like(history_row) if mask.contextual_reads_history else contextual_key
    before_targets = torch.where(i < num_contextual, contextual_row, history_row)

    # Rules that depend on where the targets of a sample start.
    target_row = history_key = j < end
    if mask.target_window and mask.window is not None:
        target_row = history_key & (in_prefix | (j >= end - mask.window))
    if mask.target_group_size == 1:
        own_group = i == j
    else:  # rounded down, so that no history token falls into the first target group
        group = (position - history_end[:, None]).div(mask.target_group_size, rounding_mode="floor")
        own_group = (group[:, :, None] == group[:, None, :]) & (j <= i)
    return torch.where(i < end, before_targets & history_key, target_row | own_group)


def count_pairs(mask: AttentionMask, layout: SequenceLayout, tail: int | None = None) -> int:
    """Count the visible pairs of a query and a key in all samples: the True entries of `dense_mask`.

    The B lengths on the host suffice, so nothing waits for a device. With `tail`, only the newest `tail`
    history tokens of each sample count as queries.

    Raises:
        ValueError: the lengths of the layout exist only on a device.
    """
    host = layout.on_host()
    # On a few numbers NumPy is several times as fast as PyTorch, and every training step counts.
    contextual, targets = host.num_contextual, host.num_targets.numpy()
    uih = host.lengths.numpy() - targets - contextual
    limit = None if mask.window is None else mask.window + mask.prefix
    history = _pairs_of_history(uih, contextual, limit)
    if tail is not None:
        history -= _pairs_of_history(np.maximum(uih - tail, 0), contextual, limit)
    contextual_sees = contextual * len(uih) + (uih.sum() if mask.contextual_reads_history else 0)
    target_sees = contextual * targets.sum() + targets @ (_near(uih, limit) if mask.target_window else uih)
    size = mask.target_group_size
    groups, rest = np.divmod(targets, size)
    within_groups = groups.sum() * (size * (size + 1) // 2) + _sum_of_triangles(rest)
    return int(contextual * contextual_sees + history + target_sees + within_groups)


def _pairs_of_history(count: NDArray[np.int64], contextual: int, limit: int | None) -> int:
    """Count the pairs of the first `count` history tokens: token h sees `contextual` tokens and min(h, limit)
    events."""
    near = _near(count, limit)
    beyond = 0 if limit is None else (count - near).sum() * limit
    return count.sum() * contextual + _sum_of_triangles(near) + beyond


def _near(count: NDArray[np.int64], limit: int | None) -> NDArray[np.int64]:
    return count if limit is None else np.minimum(count, limit)


def _sum_of_triangles(count: NDArray[np.int64]) -> int:
    """Return the sum of 1 + 2 + ... + n over all n in `count`."""
    return (count @ count + count.sum()) // 2


def key_intervals(mask: AttentionMask, layout: SequenceLayout) -> KeyIntervals:
    """Return the mask as intervals: contextual tokens and prefix, then the window, then the row's target
    group."""
    history_end = layout.history_end.index_select(0, layout.sample_ids())
    return row_intervals(mask, layout.positions(), history_end, layout.num_contextual)


def row_intervals(
    mask: AttentionMask, position: Tensor, history_end: Tensor, num_contextual: int
) -> KeyIntervals:
    """Return the keys that the rows at `position`, int64 [...], see, as intervals [..., 3].

    `history_end`, int64 broadcastable to `position`, is where the targets of each row's sample begin.
    """
    contextual = num_contextual
    is_contextual, is_target = position < contextual, position >= history_end
    nothing = torch.zeros_like(position)

    # History rows: [0, C + prefix) and the window, both cut at the row itself; without a window, everything
    # up to the row.
    row_end = torch.where(is_target, history_end, position + 1)
    windowed = torch.full_like(position, mask.window is not None, dtype=torch.bool)
    if not mask.target_window:
        windowed = windowed & ~is_target
    first_end = torch.where(windowed, torch.minimum(nothing + contextual + mask.prefix, row_end), row_end)
    middle_start = torch.maximum(first_end, row_end - (mask.window or 0))
    middle_end = torch.where(windowed, row_end, middle_start)

    contextual_end = history_end if mask.contextual_reads_history else nothing + contextual
    first_end = torch.where(is_contextual, contextual_end, first_end)
    middle_start = torch.where(is_contextual, contextual_end, middle_start)
    middle_end = torch.where(is_contextual, contextual_end, middle_end)

    place = (position - history_end).clamp(min=0)
    group_start = position - place % mask.target_group_size
    last_start = torch.where(is_target, group_start, middle_end)
    last_end = torch.where(is_target, position + 1, middle_end)
    return KeyIntervals(
        torch.stack([nothing, middle_start, last_start], dim=-1),
        torch.stack([first_end, middle_end, last_end], dim=-1),
    )


class QueryIntervals(NamedTuple):
    """Rows that see each key: contextual, history and target rows, half-open; some may be empty."""

    start: Tensor  # int64 [..., 3], positions in the key's sample
    end: Tensor  # int64 [..., 3], >= start


def column_intervals(
    mask: AttentionMask, position: Tensor, history_end: Tensor, length: Tensor, num_contextual: int
) -> QueryIntervals:
    """Return the rows that see the keys at `position`, int64 [...], in samples of `length` tokens."""
    is_target = position >= history_end
    always = position < num_contextual + mask.prefix  # includes contextual tokens
    nothing = torch.zeros_like(position)

    sees_history = history_end if mask.contextual_reads_history else nothing + num_contextual
    contextual_end = torch.where(position < sees_history, num_contextual, 0)

    history_start = torch.where(is_target, history_end, position.clamp(min=num_contextual))
    history_end_row = nothing + history_end
    if mask.window is not None:
        in_window = torch.minimum(position + mask.window, history_end)
        history_end_row = torch.where(always | is_target, history_end, in_window)

    own_group = position - (position - history_end).clamp(min=0) % mask.target_group_size
    target_start = torch.where(is_target, position, history_end)
    target_end = torch.where(is_target, torch.minimum(own_group + mask.target_group_size, length), length)
    if mask.target_window and mask.window is not None:
        hidden = ~is_target & ~always & (position < history_end - mask.window)
        target_end = torch.where(hidden, target_start, target_end)
    return QueryIntervals(
        torch.stack([nothing, history_start, target_start], dim=-1),
        torch.stack([contextual_end, history_end_row, target_end], dim=-1),
    )
