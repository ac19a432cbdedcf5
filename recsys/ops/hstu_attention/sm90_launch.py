"""From tensors to the launch of the Hopper kernel: tensor descriptors, sizes, the order of the work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from recsys.ops.hstu_attention.sm90_backward import backward_kernel
from recsys.ops.hstu_attention.sm90_forward import RAGGED_ROWS, STRIP, forward_kernel
from recsys.ops.hstu_attention.triton_launch import Gradients, Problem
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.triton_backend import num_processors

ANY_ROWS = 0x7FFF0000
"""More than any coordinate, and a size that a tensor map may have."""

WARPS = 4
"""Of a warp group."""

CACHED_BYTES = 24 * 2**20
"""What programs work on at a time, in sections of the samples: it stays in the second-level cache of an H100 or
H200 (50 and 60 MB, in two halves that may hold the same lines twice)."""


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


class BackwardSizes(NamedTuple):
    """Of the backward kernel for one width of the heads."""

    rows: int  # BLOCK_M
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    computing_registers: int
    loading_registers: int


BACKWARD_STRIPS = 2
"""Of 64 keys a tile."""

BACKWARD_SIZES = {64: BackwardSizes(64, 2, 240, 24), 128: BackwardSizes(64, 2, 240, 24)}
"""By width of the heads; wider ones take the Triton kernels."""


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
        ragged_descriptor(q, STRIP.value, dim),
        ragged_descriptor(k, sizes.keys, dim),
        ragged_descriptor(v, sizes.keys, dim),
        ragged_descriptor(out, STRIP.value, dim),
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


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, sizes: BackwardSizes | None = None
) -> Gradients:
    """Gradients of q, k and v, [T, H, D]; those of q are sums in any order. `sizes` for tests."""
    total_len, num_heads, dim = q.shape
    made = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)]
    if total_len == 0:
        return Gradients(*made, None, None)
    sizes = sizes or BACKWARD_SIZES[dim]
    mask = problem.mask
    keys = STRIP.value * BACKWARD_STRIPS
    q, k, v, grad_out = map(with_loadable_rows, (q, k, v, grad_out))
    sums = torch.zeros(total_len, num_heads, dim, dtype=torch.float32, device=q.device)
    section = max(1, CACHED_BYTES // (num_heads * dim * (2 * q.element_size() + sums.element_size())))
    items = key_work(mask, problem.layout, keys, sizes.rows, section)
    backward_kernel[(min(num_processors(q.device), items.shape[0] * num_heads),)](
        ragged_descriptor(q, sizes.rows, dim),
        ragged_descriptor(grad_out, sizes.rows, dim),
        ragged_descriptor(k, keys, dim),
        ragged_descriptor(v, keys, dim),
        ragged_descriptor(sums, sizes.rows, dim // BACKWARD_STRIPS),
        ragged_descriptor(made[1], STRIP.value, dim),
        ragged_descriptor(made[2], STRIP.value, dim),
        items,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        items.shape[0],
        num_heads,
        q.stride(1),
        grad_out.stride(1),
        k.stride(1),
        v.stride(1),
        0.5 * problem.alpha,
        1.0 / problem.scale_len,
        problem.num_contextual,
        mask.window or 0,
        mask.prefix,
        mask.target_group_size,
        D=dim,
        BLOCK_M=sizes.rows,
        STAGES=sizes.stages,
        STRIPS=BACKWARD_STRIPS,
        WINDOWED=mask.window is not None,
        TARGET_WINDOW=mask.target_window,
        GROUPED=mask.target_group_size > 1,
        CONTEXTUAL_READS=mask.contextual_reads_history,
        COMPUTING_REGISTERS=sizes.computing_registers,
        LOADING_REGISTERS=sizes.loading_registers,
        num_warps=WARPS,
    )
    torch.mul(sums, 0.5 * problem.alpha / problem.scale_len, out=made[0])
    return Gradients(*made, None, None)


def with_loadable_rows(tensor: Tensor) -> Tensor:
    """[T, H, D] as a tensor map can describe it: 16-byte steps, heads side by side within a row."""
    row, head, last = tensor.stride()
    width = (tensor.shape[1] - 1) * head + tensor.shape[2]
    step = 16 // tensor.element_size()
    aligned = row % step == 0 and head % step == 0 and tensor.data_ptr() % 16 == 0
    return tensor if last == 1 and aligned and head >= 0 and width <= row else tensor.contiguous()


def ragged_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Boxes of `rows` rows and `columns` columns of [T, H, D], cut off at the end of a sample.

    A box at (2^30, end of the sample, 2^30 - length of the sample + row, column) holds the rows of the sample
    from `row` on. The third coordinate ends at 2^30, so rows past the sample are out of bounds: read as zeros,
    not written. The first one is a way back: 2^30 steps of 2^34 - stride elements are -2^30 rows, modulo 2^64
    bytes. Source: `triton.tools.ragged_tma`.
    """
    row, head, _ = tensor.stride()
    width = (tensor.shape[1] - 1) * head + tensor.shape[2]
    bits = 8 * tensor.element_size()
    return TensorDescriptor(
        tensor,
        shape=[ANY_ROWS, ANY_ROWS, RAGGED_ROWS.value, width],
        strides=[2**34 - row, row, row, 1],
        block_shape=[1, 1, rows, columns],
        layout=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4),
    )
