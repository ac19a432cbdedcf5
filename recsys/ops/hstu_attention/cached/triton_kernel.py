"""The kernel: one tile of new rows of one head, over the blocks of cached and of new keys that it sees.

The cache is read where it lies. Positions are those in the whole sample: a new token stands behind all that
is cached of its sample. Everything else is the forward of `hstu_attention`.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.bias.kernels import load_times
from recsys.ops.hstu_attention.triton.forward import add_blocks
from recsys.ops.hstu_attention.triton.tile import (
    head_of,
    load_block,
    relative_position,
    store_block,
)
from recsys.ops.hstu_attention.work_list.item import (
    CACHE_LENGTH,
    CACHE_START,
    NEW,
    NUM_CACHED_COLUMNS,
    PART,
    PART_FIRST,
    PART_LENGTH,
    load_runs,
    load_tile,
)


@triton.jit(
    do_not_specialize=["num_items", "part_stride", "num_contextual", "window", "prefix", "group_size"]
)
def cached_kernel(
    q, k, v, cache_k, cache_v, out, items, num_items, num_heads, part_stride,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ckt, stride_ckh, stride_cvt, stride_cvh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    cache_timestamps, cache_behind, cache_bounds,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write out [T, H, V], contiguous, of the new tokens. Heads are fastest.

    SPLIT: an item is about a part of the cached keys; each part has an out, `part_stride` numbers further on.
    """
    SIZES: tl.constexpr = (D, V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    MODE: tl.constexpr = (BIASED, FAST, PRECISION, False, "", "")
    rule = (num_contextual, window, prefix, group_size)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    inverse_scale = tl.full([1, 1], inverse_scale, tl.float32)
    tables = (
        position_table + head * position_stride + reach,
        (time_table + head * time_stride, time_edges, float_edges, num_buckets),
    )
    for number in range(tl.program_id(0) // num_heads, num_items, tl.num_programs(0) // num_heads):
        item = items + tl.cast(number, tl.int64) * NUM_CACHED_COLUMNS
        start, length, history_end, first = load_tile(item)
        cache_start = tl.load(item + CACHE_START)
        cache_length = tl.load(item + CACHE_LENGTH).to(tl.int32)
        part_first, part_length = 0, cache_length
        if SPLIT:
            part_first = tl.load(item + PART_FIRST).to(tl.int32)
            part_length = tl.load(item + PART_LENGTH).to(tl.int32)
        q_head = head_of(q, start, length, head, (stride_qt, stride_qh))
        q_block = load_block(q_head, first, length, D, BLOCK_M, BLOCK_D, False)
        at = first + tl.arange(0, BLOCK_M)[:, None]
        i = at + cache_length
        row_times = (next_timestamps + start, ahead + start, row_bounds + start * 2)
        if BIASED:
            row_times = load_times(row_times, at, first, length)
        rows = (i, relative_position(i, history_end, group_size, RULE), row_times, first)
        sample = (history_end, alpha)
        total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for source in range(2):  # a loop, not code twice: that would not fit into the registers
            is_new = source == 1
            key_start = tl.where(is_new, start, cache_start + part_first)
            stride_k = tl.where(is_new, stride_kt, stride_ckt)
            stride_v = tl.where(is_new, stride_vt, stride_cvt)
            key_head = tl.where(is_new, k + head * stride_kh, cache_k + head * stride_ckh)
            value_head = tl.where(is_new, v + head * stride_vh, cache_v + head * stride_cvh)
            key_times = (
                tl.where(is_new, timestamps, cache_timestamps) + key_start,
                tl.where(is_new, behind, cache_behind) + key_start,
                tl.where(is_new, key_bounds, cache_bounds) + key_start * 2,
            )
            keys = (
                (key_head + key_start * stride_k, stride_k, 0),
                (value_head + key_start * stride_v, stride_v, 0),
                key_times,
                tl.where(is_new, length, part_length),
                tl.where(is_new, cache_length, part_first),
            )
            listed = item + source * NEW
            runs = load_runs(listed)
            total = add_blocks(
                total, q_block, listed, runs, keys, sample, rows, rule, tables, SIZES, RULE, MODE
            )
        out_head = out + (start * num_heads + head) * V
        if SPLIT:
            out_head += tl.load(item + PART) * part_stride
        store_block(out_head, first, length, num_heads * V, total * inverse_scale, V, BLOCK_M, BLOCK_V)
