"""What the Triton kernels take of a relative bias: padded tables, edges of buckets, times block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recsys.ops.hstu_attention.triton_bias import PAST_THE_END, times_kernel
from recsys.ops.layout import SequenceLayout
from recsys.ops.relative_bias import LOG_BUCKET, RelativeBias

MAX_EDGE = 2**62
"""No difference of two times in seconds comes near it."""

LARGEST_BLOCK = PAST_THE_END.value
"""Tokens: so far past the end of a sample blocks may reach."""

NUM_ARGUMENTS = 14
"""Of `bias_arguments`."""


def bias_arguments(
    bias: RelativeBias | None,
    layout: SequenceLayout,
    longest: int,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Callable[[Any], Any],
) -> list[Tensor | int]:
    """From `position_table` to `num_buckets`, in the order of the kernels' parameters.

    Both tables are in float32 and halved, as the scores are. That of positions begins at distance `-reach`:
    its ends are repeated as far as there are distances, so that no kernel compares them with its ends.

    Args:
        longest: no sample has more tokens, cached ones among them.
        items: tiles of `max(rows, keys)` tokens.
        rows, keys: tokens of a block of rows and of a block of keys, powers of two.
    """
    if bias is None:
        return [items] * 10 + [0, 0, 0, 1]
    position, time = (0.5 * table.detach().float() for table in (bias.position_table, bias.time_table))
    num_positions, num_buckets = int(position.shape[-1]), int(time.shape[-1])
    reach = longest + LARGEST_BLOCK
    index = layout.memo(
        ("distances", num_positions, reach),
        lambda: torch.arange(-reach, reach + 1, device=position.device).clamp(0, num_positions - 1),
    )
    position, time = position.index_select(-1, index), time.contiguous()
    edges = time_edges(num_buckets)  # a constant of the model, also in a traced graph
    exact = layout.memo(("time_edges", num_buckets), lambda: _constant(edges, time.device))
    rounded = layout.memo(("float_time_edges", num_buckets), exact.float)
    return [
        position,
        time,
        exact,
        rounded,
        *_times(bias.timestamps, bias.next_timestamps, items, rows, keys, wrap),
        position.stride(0) if position.dim() == 2 else 0,
        time.stride(0) if time.dim() == 2 else 0,
        reach,
        num_buckets,
    ]


def cached_times(
    times: Tensor, items: Tensor, tile: int, keys: int, wrap: Callable[[Any], Any]
) -> list[Tensor]:
    """Of cached tokens: their times, offsets and bounds; `items` are tiles of `tile` of them."""
    times = times.contiguous()
    offsets, bounds = _offsets_and_bounds(times)
    if times.shape[0] > 0:
        wrap(times_kernel)[(items.shape[0],)](
            times, times, offsets, bounds, offsets, bounds, items, times.shape[0],
            COLUMNS=items.shape[1], BLOCK=tile, ROWS=0, KEYS=keys,
        )  # fmt: skip
    return [times, offsets, bounds]


def _times(
    timestamps: Tensor,
    next_timestamps: Tensor,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Callable[[Any], Any],
) -> list[Tensor]:
    """From `timestamps` to `row_bounds`."""
    timestamps, next_timestamps = timestamps.contiguous(), next_timestamps.contiguous()
    behind, ahead = _offsets_and_bounds(timestamps), _offsets_and_bounds(next_timestamps)
    wrap(times_kernel)[(items.shape[0],)](
        timestamps, next_timestamps, *behind, *ahead, items, timestamps.shape[0],
        COLUMNS=items.shape[1], BLOCK=max(rows, keys), ROWS=rows, KEYS=keys,
    )  # fmt: skip
    return [timestamps, *behind, next_timestamps, *ahead]


def _offsets_and_bounds(times: Tensor) -> tuple[Tensor, Tensor]:
    size = times.shape[0] + LARGEST_BLOCK
    return times.new_empty(size, dtype=torch.float32), times.new_empty(size, 2)


def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] on the device, without waiting for it."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    return _sent(numbers, device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    # Kept: a CUDA graph that is being recorded must not copy from host memory that is gone when it runs.
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def time_edges(num_buckets: int) -> tuple[int, ...]:
    """The least difference in seconds of each time bucket, and one that none reaches: exact by definition."""
    edges = [1]
    for bucket in range(1, num_buckets):
        low, high = max(edges[-1] - 1, 1), MAX_EDGE  # bucket(low) < bucket; the answer is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            reached = math.log(middle) / LOG_BUCKET >= bucket
            low, high = (low, middle) if reached else (middle, high)
        edges.append(high)
    return (*edges, 2**63 - 1)
