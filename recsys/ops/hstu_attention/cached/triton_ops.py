"""Launches the cached kernel: directly in eager mode, as one library op in graphs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.hstu_attention.bias.launch import LARGEST_BLOCK, bias_arguments, cached_times
from recsys.ops.hstu_attention.cached.triton_kernel import cached_kernel
from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from recsys.ops.hstu_attention.triton.launch import (
    Wrap,
    blocks_for,
    constants,
    scalars,
    strides,
    unwrapped,
    with_dense_rows,
)
from recsys.ops.hstu_attention.work_list import cached_work, row_work
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import CachedRelativeBias
from recsys.ops.runtime.registration import traceable_op
from recsys.ops.runtime.triton_support import num_processors

PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor, enough to keep it busy."""

LEAST_BLOCKS, MOST_PARTS = 4, 32
"""Least blocks of keys in a part; most parts, each of which needs memory for all outputs."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    problem: CachedProblem,
    wrap: Wrap = unwrapped,
) -> Tensor:
    """`hstu_attention_cached` [T, H, V]; the arguments have been validated."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if q.shape[0] == 0:
        return out
    tensors = tuple(map(with_dense_rows, (q, k, v, cache_k, cache_v)))
    bias = problem.bias
    num_heads = q.shape[1]
    blocks, parts = blocks_for("split", q, v, problem), 1
    if wrap is unwrapped:  # a graph is for many sizes, and knows none
        parts = num_parts(problem, blocks, num_heads, q.device)
    if parts == 1:
        blocks = blocks_for("forward", q, v, problem)
    items = cached_work(problem.mask, problem.layout, problem.cache_layout, blocks.rows, blocks.keys, parts)
    # Without a softmax an output is a sum over keys: that of the parts, in their order.
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
    """Return how many parts to sum the cached keys up in: more than one if tiles are too few for the GPU.

    A power of two, so that few batches need memory of their own.
    """
    layout, num_keys = problem.layout, problem.cache_layout.max_len
    tiles = max(layout.total_len // blocks.rows, min(layout.batch_size, layout.total_len))
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device) // (tiles * num_heads)
    most = min(wanted, num_keys // (LEAST_BLOCKS * blocks.keys), MOST_PARTS)
    return 1 << max(most, 1).bit_length() - 1


def call_op(
    q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem
) -> Tensor:
    """The library op, for traced graphs."""
    layout, cache_layout, mask, bias = problem.layout, problem.cache_layout, problem.mask, problem.bias
    tables = (None,) * 5
    if bias is not None:
        tables = (
            bias.position_table,
            bias.time_table,
            bias.timestamps,
            bias.next_timestamps,
            bias.cache_timestamps,
        )
    return hstu_attention_cached_triton(
        q,
        k,
        v,
        cache_k,
        cache_v,
        layout.lengths,
        layout.offsets,
        layout.num_targets,
        cache_layout.lengths,
        cache_layout.offsets,
        *tables,
        cache_layout.num_contextual,
        mask.window,
        mask.prefix,
        mask.target_window,
        mask.target_group_size,
        mask.contextual_reads_history,
        problem.alpha,
        problem.scale_len,
    )


@traceable_op("hstu_attention_cached_triton")
def hstu_attention_cached_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    cache_lengths: Tensor,
    cache_offsets: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    timestamps: Tensor | None,
    next_timestamps: Tensor | None,
    cache_timestamps: Tensor | None,
    num_contextual: int,
    window: int | None,
    prefix: int,
    target_window: bool,
    target_group_size: int,
    contextual_reads_history: bool,
    alpha: float,
    scale_len: float,
) -> Tensor:
    """`hstu_attention_cached` with its layouts, mask and bias spread out."""
    total, cached = q.shape[0], cache_k.shape[0]  # also bounds of the longest sample
    layout = SequenceLayout.trusted(lengths, offsets, num_targets, 0, total, total, total)
    cache_layout = SequenceLayout.trusted(
        cache_lengths, cache_offsets, torch.zeros_like(cache_lengths), num_contextual, cached, cached, 0
    )
    mask = AttentionMask(window, prefix, target_window, target_group_size, contextual_reads_history)
    bias = None
    if position_table is not None and time_table is not None:
        if timestamps is None or next_timestamps is None or cache_timestamps is None:
            raise ValueError("bias tables without timestamps, next_timestamps and cache_timestamps")
        bias = CachedRelativeBias(position_table, time_table, timestamps, next_timestamps, cache_timestamps)
    problem = CachedProblem(layout, mask, alpha, scale_len, bias, cache_layout=cache_layout)
    return forward(q, k, v, cache_k, cache_v, problem, wrap_triton)
