"""Triton kernel of `hstu_attention_cached` and its launch: called directly in eager mode, an op in graphs.

A program has one tile of new rows of one head, and visits the blocks of cached and of new keys that it sees.
The cache is read in place. Positions are those in the whole sample: a new token stands behind all cached
ones. Everything else is as in the forward of `hstu_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.hstu_attention.bias.kernels import LARGEST_BLOCK, bias_arguments, cached_times, load_times
from recsys.ops.hstu_attention.block_sizes import Blocks, blocks_for
from recsys.ops.hstu_attention.problem import CachedProblem, FlatProblem, Problem, flattened
from recsys.ops.hstu_attention.triton import constants, scalars, strides, with_dense_rows
from recsys.ops.hstu_attention.triton_kernels import (
    add_blocks,
    head_of,
    load_block,
    relative_position,
    store_block,
)
from recsys.ops.hstu_attention.work_list import cached_work, row_work
from recsys.ops.hstu_attention.work_list.kernels import (
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
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.launch import Wrap, is_zero, unwrapped
from recsys.ops.runtime.registration import flat_signature, traceable_op
from recsys.ops.runtime.triton_support import num_processors

PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor, enough to keep it busy."""

LEAST_BLOCKS, MOST_PARTS = 4, 32
"""Fewest blocks of keys per part; most parts, each of which needs memory for all outputs."""


def run(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem) -> Tensor:
    """Run the kernel: scores, sums and bias are float32. The cache is read in place, and only where the mask
    allows."""
    compute = call_op if torch.compiler.is_compiling() else forward
    return compute(q, k, v, cache_k, cache_v, problem)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    problem: CachedProblem,
    wrap: Wrap = unwrapped,
) -> Tensor:
    """Compute `hstu_attention_cached` [T, H, V]; the arguments have been validated."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if is_zero(q.shape[0]):
        return out
    tensors = tuple(map(with_dense_rows, (q, k, v, cache_k, cache_v)))
    bias = problem.bias
    num_heads = q.shape[1]
    blocks, parts = blocks_for("split", q, v, problem), 1
    if wrap is unwrapped:  # a graph serves many sizes and knows none
        parts = num_parts(problem, blocks, num_heads, q.device)
    if parts == 1:
        blocks = blocks_for("forward", q, v, problem)
    items = cached_work(problem.mask, problem.layout, problem.cache_layout, blocks.rows, blocks.keys, parts)
    # Without a softmax an output is a sum over keys: add the parts, in their order.
    sums = out if parts == 1 else out.new_empty(parts, *out.shape, dtype=torch.float32)
    longest = problem.layout.max_len + problem.cache_layout.max_len
    of_bias = bias_arguments(bias, problem.layout, longest, items, blocks.rows, blocks.keys, wrap)
    of_cache = [items] * 3
    if bias is not None:
        tiles = row_work(AttentionMask(), problem.cache_layout, LARGEST_BLOCK, LARGEST_BLOCK)
        of_cache = cached_times(bias.cache_timestamps, tiles, LARGEST_BLOCK, blocks.keys, wrap)
    wrap(cached_kernel)[(items.shape[0] * num_heads,)](
        *tensors,
        sums,
        items,
        items.shape[0],
        num_heads,
        out.numel(),
        *strides(*tensors),
        *scalars(problem),
        *of_bias,
        *of_cache,
        SPLIT=parts > 1,
        **constants(problem, q, v, blocks),
    )
    return out if parts == 1 else sums.sum(0).to(out.dtype)


def num_parts(problem: CachedProblem, blocks: Blocks, num_heads: int, device: torch.device) -> int:
    """Return the number of parts to cut the cached keys into: more than one if there are too few tiles for
    the GPU.

    The number is a power of two, so that batches need few different buffer sizes.
    """
    layout, num_keys = problem.layout, problem.cache_layout.max_len
    tiles = max(layout.total_len // blocks.rows, min(layout.batch_size, layout.total_len))
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device) // (tiles * num_heads)
    limit = min(wanted, num_keys // (LEAST_BLOCKS * blocks.keys), MOST_PARTS)
    return 1 << max(limit, 1).bit_length() - 1


class FlatCache(NamedTuple):
    """The cache as the library op takes it, after the problem of the new tokens."""

    cache_k: Tensor
    cache_v: Tensor
    cache_lengths: Tensor
    cache_offsets: Tensor
    cache_timestamps: Tensor | None
    num_cached_contextual: int

    def of(self, new: Problem) -> CachedProblem:
        """Returns the problem; the number of cached rows bounds the longest sample, too."""
        size = self.cache_k.shape[0]
        no_targets = torch.zeros_like(self.cache_lengths)
        cache_layout = SequenceLayout.trusted(
            self.cache_lengths, self.cache_offsets, no_targets, self.num_cached_contextual, size, size, 0
        )
        bias = new.bias
        if bias is not None:
            if self.cache_timestamps is None:
                raise ValueError("bias tables without cache_timestamps")
            bias = bias.with_cache(self.cache_timestamps)
        return CachedProblem(new.layout, new.mask, new.alpha, new.scale_len, bias, cache_layout=cache_layout)


def call_op(
    q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem
) -> Tensor:
    """Call the library op, for traced graphs."""
    layout, bias = problem.cache_layout, problem.bias
    times = None if bias is None else bias.cache_timestamps
    cache = FlatCache(cache_k, cache_v, layout.lengths, layout.offsets, times, layout.num_contextual)
    return hstu_attention_cached_triton(q, k, v, *flattened(problem), *cache)


@traceable_op("hstu_attention_cached_triton")
@flat_signature(dict.fromkeys(("q", "k", "v"), Tensor), FlatProblem, FlatCache, returns=Tensor)
def hstu_attention_cached_triton(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tensor:
    """Compute `hstu_attention_cached` for a flattened problem and cache."""
    new, cache = FlatProblem(*flat[: len(FlatProblem._fields)]), FlatCache(*flat[len(FlatProblem._fields) :])
    problem = cache.of(new.rebuilt(q.shape[0]))
    return forward(q, k, v, cache.cache_k, cache.cache_v, problem, wrap_triton)


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
    """Write out [T, H, V] for the new tokens, contiguous. One program runs per item and head, heads fastest.

    SPLIT: an item covers one part of the cached keys; each part has an out, `part_stride` elements after the
    previous one.
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
        for source in range(2):  # a loop, since two copies of the code would not fit into the registers
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
