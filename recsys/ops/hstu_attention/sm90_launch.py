"""From tensors to the launch of the Hopper kernel: tensor descriptors, sizes, the order of the work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from recsys.ops.hstu_attention.sm90_forward import RAGGED_ROWS, STRIP, forward_kernel
from recsys.ops.hstu_attention.triton_launch import Problem
from recsys.ops.hstu_attention.work_list import row_work
from recsys.ops.triton_backend import num_processors

ANY_ROWS = 0x7FFF0000
"""More than any coordinate, and a size that a tensor map may have."""

WARPS = 4
"""Of a warp group."""

CACHED_BYTES = 24 * 2**20
"""Keys and values that programs work on at a time: what stays in the second-level cache of an H100 or H200
(50 and 60 MB, in two halves that may hold the same lines twice)."""


class Sizes(NamedTuple):
    """Of the kernel for one width of the heads."""

    keys: int  # BLOCK_N
    stages: int  # buffers for blocks of keys, and as many for values
    strips: int  # of 64 rows a tile, a warp group each
    out_in_q: bool  # whether rows of the output leave through the buffer of q
    computing_registers: int
    loading_registers: int
    turns: bool  # whether the strips start their products in turn

    @property
    def rows(self) -> int:
        """Of a tile."""
        return STRIP.value * self.strips


SIZES = {
    64: Sizes(128, 3, 2, False, 240, 24, False),
    128: Sizes(128, 2, 2, False, 240, 24, False),
    256: Sizes(64, 2, 2, True, 232, 40, False),
}
"""By width of the heads."""


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, sizes: Sizes | None = None) -> Tensor:
    """`hstu_attention` [T, H, D], 16 bits, no bias; the arguments have been validated. `sizes` for tests."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    total_len, num_heads, dim = q.shape
    if total_len == 0:
        return out
    sizes = sizes or SIZES[dim]
    mask = problem.mask
    q, k, v = map(with_loadable_rows, (q, k, v))
    section = max(1, CACHED_BYTES // (2 * num_heads * dim * q.element_size()))
    items = row_work(mask, problem.layout, sizes.rows, sizes.keys, section)
    forward_kernel[(min(num_processors(q.device), items.shape[0] * num_heads),)](
        ragged_descriptor(q, STRIP.value),
        ragged_descriptor(k, sizes.keys),
        ragged_descriptor(v, sizes.keys),
        ragged_descriptor(out, STRIP.value),
        items,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        items.shape[0],
        num_heads,
        q.stride(1),
        k.stride(1),
        v.stride(1),
        0.5 * problem.alpha,
        1.0 / problem.scale_len,
        problem.num_contextual,
        mask.window or 0,
        mask.prefix,
        mask.target_group_size,
        D=dim,
        BLOCK_N=sizes.keys,
        STAGES=sizes.stages,
        STRIPS=sizes.strips,
        WINDOWED=mask.window is not None,
        TARGET_WINDOW=mask.target_window,
        GROUPED=mask.target_group_size > 1,
        CONTEXTUAL_READS=mask.contextual_reads_history,
        TURNS=sizes.turns,
        OUT_IN_Q=sizes.out_in_q,
        COMPUTING_REGISTERS=sizes.computing_registers,
        LOADING_REGISTERS=sizes.loading_registers,
        num_warps=WARPS,
    )
    return out


def with_loadable_rows(tensor: Tensor) -> Tensor:
    """[T, H, D] as a tensor map can describe it: 16-byte steps, heads side by side within a row."""
    row, head, last = tensor.stride()
    width = (tensor.shape[1] - 1) * head + tensor.shape[2]
    step = 16 // tensor.element_size()
    aligned = row % step == 0 and head % step == 0 and tensor.data_ptr() % 16 == 0
    return tensor if last == 1 and aligned and head >= 0 and width <= row else tensor.contiguous()


def ragged_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of `rows` rows of one head of [T, H, D], cut off at the end of a sample.

    A box at (2^30, end of the sample, 2^30 - length of the sample + row, column) holds the rows of the sample
    from `row` on. The third coordinate ends at 2^30, so rows past the sample are out of bounds: read as
    zeros, not written. The first one is a way back: 2^30 steps of 2^34 - stride elements are -2^30 rows,
    modulo 2^64 bytes. Source: `triton.tools.ragged_tma`.
    """
    row, head, _ = tensor.stride()
    width = (tensor.shape[1] - 1) * head + tensor.shape[2]
    block = [1, 1, rows, tensor.shape[2]]
    return TensorDescriptor(
        tensor,
        shape=[ANY_ROWS, ANY_ROWS, RAGGED_ROWS.value, width],
        strides=[2**34 - row, row, row, 1],
        block_shape=block,
        layout=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4),
    )
