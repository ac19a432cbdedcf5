"""Add the relative bias to a block of scores; the time buckets that occur in the block decide how.

The times of a block's tokens are stored as float32 offsets from one of them. `times_kernel` writes these once
for all readers, together with the exact earliest and latest time of the block, from which follows which
buckets a block of scores contains. Far from the diagonal there are one or a few: the bias is that of the
lowest bucket, plus a step at the edge of each further bucket. Near the diagonal the bucket of each score is
looked up. Both are exact as long as whole seconds are exact in float32; times further apart are compared as
int64. The times may be in any order.

Scores come in both orientations: the name `one` denotes the tokens of the first dimension, `other` those of
the second. The time between two tokens counts without its sign.

    tables  pointer to distance 0 of the position table; time_table, time_edges, float_edges, num_buckets

`bias_arguments` prepares a bias for the kernels: padded tables, bucket edges, times block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.hstu_attention.bias import ptx as ptx
from recsys.ops.hstu_attention.work_list.kernels import load_tile
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.relative_bias import LOG_BUCKET, RelativeBias
from recsys.ops.runtime.launch import Wrap, unwrapped

BUCKETS_PER_OCTAVE = tl.constexpr(0.6931471805599453 / LOG_BUCKET)
"""Time buckets per factor of two in elapsed time."""

EXACT = tl.constexpr(2**24)
"""Integers below this are exact in float32."""

FEW = tl.constexpr(8)
"""With at most this many bucket edges in a block, adding steps costs less than looking up each score's
bucket."""

FAR = tl.constexpr(2**62)
"""A time later than any other, in seconds."""

PAST_THE_END = tl.constexpr(128)
"""Number of zeros after the last offset: blocks are read whole."""


@triton.jit
def block_times(
    times, start, first, length, BLOCK: tl.constexpr, SIZE: tl.constexpr, BEHIND: tl.constexpr
):  # fmt: skip
    """Cut a tile of BLOCK tokens into blocks of SIZE tokens and compute their times.

    Return the first token of each block, all tokens [blocks, SIZE], the earliest and latest time of each
    block, and all offsets: seconds before the latest time if BEHIND, otherwise after the earliest.
    """
    block = first + tl.arange(0, BLOCK // SIZE) * SIZE
    at = block[:, None] + tl.arange(0, SIZE)[None, :]
    time = tl.load(times + start + at, mask=at < length, other=0)
    low = tl.min(tl.where(at < length, time, FAR), 1)
    high = tl.max(tl.where(at < length, time, -FAR), 1)
    offset = high[:, None] - time if BEHIND else time - low[:, None]
    return block, at, low, high, offset


@triton.jit
def store_bounds(bounds, start, block, length, low, high):
    """Store the earliest and latest time of each block at the block's first token."""
    pointer = bounds + (start + block) * 2
    tl.store(pointer, low, mask=block < length)
    tl.store(pointer + 1, high, mask=block < length)


@triton.jit
def _write_times(
    times, offsets, bounds, start, first, length,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, BEHIND: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write offsets and bounds of a tile of BLOCK tokens, in blocks of SIZE: see `times_kernel`."""
    block, at, low, high, offset = block_times(times, start, first, length, BLOCK, SIZE, BEHIND)
    tl.store(offsets + start * STEP + at, offset.to(tl.float32), mask=at < length)
    store_bounds(bounds, start, block, length, low, high)


@triton.jit(do_not_specialize=["total_len"])
def times_kernel(
    timestamps, next_timestamps, behind, key_bounds, ahead, row_bounds, items, total_len,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write offsets and bounds; one program per tile of BLOCK tokens of a sample.

    behind: float32 [STEP * T + PAST_THE_END], the seconds from each token to the latest token of its block of
        KEYS tokens.
    key_bounds: int64 [T, 2], earliest and latest time of each block, stored at its first token.
    ahead, row_bounds: the same for `next_timestamps` in blocks of ROWS tokens, but in seconds after the
        earliest token. ROWS = 0 omits them.
    STEP: the offsets of a sample are contiguous and begin at STEP times the index of its first token.
    """
    start, length, _, first = load_tile(items + tl.program_id(0).to(tl.int64) * COLUMNS)
    _write_times(timestamps, behind, key_bounds, start, first, length, BLOCK, KEYS, True, STEP)
    if ROWS > 0:
        _write_times(next_timestamps, ahead, row_bounds, start, first, length, BLOCK, ROWS, False, STEP)
    if tl.program_id(0) == 0:
        end = total_len * STEP + tl.arange(0, PAST_THE_END)
        tl.store(behind + end, tl.zeros([PAST_THE_END], tl.float32))
        if ROWS > 0:
            tl.store(ahead + end, tl.zeros([PAST_THE_END], tl.float32))


@triton.jit
def load_times(times, at, first, length):
    """Load the times of a block: pointers to the exact times, offsets, and the earliest and latest time.

    times: pointers to the sample's times, offsets and bounds; at: the block's tokens, as a row or a column.
    """
    exact, offsets, bounds = times
    low = tl.load(bounds + first * 2)
    high = tl.load(bounds + first * 2 + 1)
    return exact + tl.minimum(at, length - 1), tl.load(offsets + at), low, high


@triton.jit
def log2(x, FAST: tl.constexpr):
    """Return the base-2 logarithm of normal floating-point numbers."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def time_bucket(seconds, time_edges, num_buckets):
    """Return the bucket of a difference in seconds, int64, exactly.

    A float32 logarithm may land on the wrong side of an edge, so it only selects which edge to compare with.
    `time_edges[b]` is the least whole number of seconds in bucket `b`, and `time_edges[num_buckets]` lies
    beyond all of them.
    """
    seconds = tl.maximum(tl.where(seconds < 0, -seconds, seconds), 1)
    guess = tl.log2(seconds.to(tl.float32)) * BUCKETS_PER_OCTAVE - 1e-3
    guess = tl.minimum(tl.maximum(guess.to(tl.int32), 0), num_buckets - 1)
    return tl.where(seconds >= tl.load(time_edges + guess + 1), guess + 1, guess)


@triton.jit
def look_up(table, index, FAST: tl.constexpr):
    """Return `table[index]`, float32. FAST keeps the layout of the scores, which Triton's own load would
    change."""
    if FAST:
        pointer = (table + index).to(tl.int64)
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointer], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(table + index)


@triton.jit
def block_buckets(rows, keys, time_edges, num_buckets):
    """Return, for the scores of two blocks (see `load_times`): the least difference in time in seconds,
    whether differences from it are exact in float32, whether all differences are, and the lowest and highest
    bucket."""
    least = rows[2] - keys[3]
    most = rows[3] - keys[2]
    largest = tl.maximum(most, -least)
    low = time_bucket(tl.maximum(tl.maximum(least, -most), 0), time_edges, num_buckets)
    high = time_bucket(largest, time_edges, num_buckets)
    small = largest < EXACT
    return least, (most - least < EXACT) & (small | (least >= 0)), small, low, high


@triton.jit
def is_past(edge, least, one, other, FAST: tl.constexpr):
    """Return 1.0 where at least `edge` seconds passed, else 0.0; differences from `least` must be exact."""
    edge = (edge - tl.maximum(least, 0)).to(tl.int32).to(tl.float32)
    seconds = tl.abs((one[1] + tl.minimum(least, 0).to(tl.float32)) + other[1])
    if FAST:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [seconds, 1.0 - edge], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(seconds + (1.0 - edge), 0.0), 1.0)


@triton.jit
def is_long_past(edge, one, other):
    """Return the same as `is_past`, for any times."""
    elapsed = tl.load(one[0]) - tl.load(other[0])
    return ((elapsed >= edge) | (elapsed <= -edge)).to(tl.float32)


@triton.jit
def add_time_bias(score, rows, keys, one, other, tables, FAST: tl.constexpr):
    """Return `score` plus the time bias; `rows` and `keys` come from `load_times`."""
    time_table, time_edges, float_edges, num_buckets = tables
    least, exact, small, low, high = block_buckets(rows, keys, time_edges, num_buckets)
    if small & (high - low > FEW):
        seconds = tl.maximum(tl.abs((one[1] + least.to(tl.float32)) + other[1]), 1.0)
        guess = (log2(seconds, FAST) * BUCKETS_PER_OCTAVE - 1e-3).to(tl.int32)
        guess = tl.minimum(guess, num_buckets - 1)
        buckets = tl.where(seconds >= look_up(float_edges + 1, guess, FAST), guess + 1, guess)
        score += look_up(time_table, buckets, FAST)
    else:
        score += tl.load(time_table + low)
        for bucket in range(low + 1, high + 1):
            edge = tl.load(time_edges + bucket)
            step = tl.load(time_table + bucket) - tl.load(time_table + bucket - 1)
            if exact:
                score += step * is_past(edge, least, one, other, FAST)
            else:
                score += step * is_long_past(edge, one, other)
    return score


@triton.jit
def add_bias(score, rows, keys, one, other, one_place, other_place, tables, FAST: tl.constexpr):
    """Return `score` plus the bias, in the scale of the tables.

    rows, keys: from `load_times`; `one` and `other` are the same two in the order of the dimensions.
    one_place, other_place: two numbers whose sum is the distance.
    """
    distances, of_times = tables
    score += look_up(distances + one_place, other_place, FAST)
    return add_time_bias(score, rows, keys, one, other, of_times, FAST)


MAX_EDGE = 2**62
"""Exceeds every difference of two times, in seconds."""

LARGEST_BLOCK = PAST_THE_END.value
"""Number of tokens that a block may reach past the end of a sample."""


def bias_arguments(
    bias: RelativeBias | None,
    layout: SequenceLayout,
    longest: int,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Wrap,
    shared: bool = False,
) -> list[Tensor | int]:
    """Return the arguments `position_table` to `num_buckets`, in the order of the kernels' parameters.

    Both tables are in float32 and halved, as the scores are. The position table begins at distance `-reach`;
    its ends are repeated for all distances past them, so that no kernel has to clamp.

    Args:
        longest: upper bound on the tokens of a sample, including cached ones.
        items: tiles of `max(rows, keys)` tokens.
        rows, keys: tokens of a block of rows and of a block of keys, powers of two.
        shared: whether calls with the same layout and times share what is computed from the times; ignored
            in graphs.
    """
    if bias is None:
        return [items] * 10 + [0, 0, 0, 1]
    position, time = (0.5 * table.detach().float() for table in (bias.position_table, bias.time_table))
    num_positions, num_buckets = int(position.shape[-1]), int(time.shape[-1])
    reach = longest + LARGEST_BLOCK
    position = position.index_select(-1, _distances(layout, num_positions, reach, position.device))
    time = time.contiguous()
    edges = time_edges(num_buckets)  # a constant of the model, also in a traced graph
    exact = layout.memo(("time_edges", num_buckets), lambda: constant(edges, time.device, wrap))
    rounded = layout.memo(("float_time_edges", num_buckets), exact.float)
    times = bias.timestamps, bias.next_timestamps

    def build() -> list[Tensor]:
        return times_of(*times, items, rows, keys, wrap)

    return [
        position,
        time,
        exact,
        rounded,
        *(kept(layout, ("bias_times", rows, keys), times, build) if shared else build()),
        position.stride(0) if position.dim() == 2 else 0,
        time.stride(0) if time.dim() == 2 else 0,
        reach,
        num_buckets,
    ]


def kept(
    layout: SequenceLayout,
    name: tuple[Hashable, ...],
    times: tuple[Tensor, ...],
    build: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """Return `build()`, shared by the layers of a model as long as they pass the same times."""
    if any(t.is_inference() for t in times):  # inference tensors have no version
        return build()
    key = (*name, *((t.data_ptr(), t._version, t.stride(0)) for t in times))
    return layout.memo(key, lambda: (times, build()))[1]  # keeping `times` reserves their addresses


def _distances(layout: SequenceLayout, num_positions: int, reach: int, device: torch.device) -> Tensor:
    """Return int64 [2 * reach + 1]: the index in the position table for each distance from `-reach` on."""
    return layout.memo(
        ("distances", num_positions, reach),
        lambda: torch.arange(-reach, reach + 1, device=device).clamp(0, num_positions - 1),
    )


def cached_times(times: Tensor, items: Tensor, tile: int, keys: int, wrap: Wrap) -> list[Tensor]:
    """Return the times, offsets and bounds of cached tokens; `items` are tiles of `tile` cached tokens."""
    times = times.contiguous()
    offsets, bounds = _offsets_and_bounds(times)
    if times.shape[0] > 0:
        wrap(times_kernel)[(items.shape[0],)](
            times, times, offsets, bounds, offsets, bounds, items, times.shape[0],
            COLUMNS=items.shape[1], BLOCK=tile, ROWS=0, KEYS=keys, STEP=1,
        )  # fmt: skip
    return [times, offsets, bounds]


def times_of(
    timestamps: Tensor,
    next_timestamps: Tensor,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Wrap,
    *,
    step: int = 1,
) -> list[Tensor]:
    """Return the arguments `timestamps` to `row_bounds` of the kernels."""
    timestamps, next_timestamps = timestamps.contiguous(), next_timestamps.contiguous()
    behind, ahead = (_offsets_and_bounds(times, step) for times in (timestamps, next_timestamps))
    wrap(times_kernel)[(items.shape[0],)](
        timestamps, next_timestamps, *behind, *ahead, items, timestamps.shape[0],
        COLUMNS=items.shape[1], BLOCK=max(rows, keys), ROWS=rows, KEYS=keys, STEP=step,
    )  # fmt: skip
    return [timestamps, *behind, next_timestamps, *ahead]


def _offsets_and_bounds(times: Tensor, step: int = 1) -> tuple[Tensor, Tensor]:
    size = times.shape[0]
    offsets = times.new_empty(step * size + LARGEST_BLOCK, dtype=torch.float32)
    return offsets, times.new_empty(size + LARGEST_BLOCK, 2)


def constant(numbers: tuple[int, ...], device: torch.device, wrap: Wrap) -> Tensor:
    """Return int64 [n] on the device, in eager mode without waiting for the device. A traced graph gets a
    constant of its own: its tensors are fake, so they must neither be cached nor mix with real ones."""
    if device.type != "cuda" or wrap is not unwrapped:
        return torch.tensor(numbers, device=device)
    return _sent(numbers, device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    # The result is cached: a CUDA graph recorded later must not copy from host memory that is gone when the
    # graph runs.
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def time_edges(num_buckets: int) -> tuple[int, ...]:
    """Return the least difference in seconds of each time bucket, exactly, and a last edge that no difference
    reaches."""
    edges = [1]
    for bucket in range(1, num_buckets):
        low, high = max(edges[-1] - 1, 1), MAX_EDGE  # bucket(low) < bucket; the answer is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            reached = math.log(middle) / LOG_BUCKET >= bucket
            low, high = (low, middle) if reached else (middle, high)
        edges.append(high)
    return (*edges, 2**63 - 1)
