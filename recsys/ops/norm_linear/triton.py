"""Computes norm, projection and their gradients as one autograd function, by kernels in float32.

    n = y w + b,    y = (x - mean) / sqrt(variance + eps)
    dy = w dn,      dx = (dy - mean(dy) - y mean(y dy)) / sqrt(variance + eps) + (gradient of a residual sum)
    dw = sum over rows of y dn, db = sum over rows of dn

Backward reads x anyway, so it computes the statistics again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.norm_linear import NormLinear as Result
from recsys.ops.norm_linear import NormLinearInputs, NormLinearOptions
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.column_sums import (
    RowBlocks,
    column_sums,
    linear,
    normed,
    row_blocks,
    sum_of_parts,
    weight_gradient,
    with_dense_rows,
)
from recsys.ops.runtime.launch import launch
from recsys.ops.runtime.triton_support import num_processors

FORWARD_ENTRIES = 4096
"""Entries per program's block, rows x columns, unless a single row has more."""

BACKWARD_ENTRIES, FEWER_ENTRIES, SHORT = 2048, 1024, 512
"""Entries per program's block in backward, for rows of up to `SHORT` columns and for longer rows; and
`SHORT`."""

ENTRIES_PER_WARP, LEAST_WARPS = 512, 4

WORKERS_PER_PROCESSOR = 4
"""Programs of the backward kernel per multiprocessor; each sums gradients of the parameters over its rows."""


def run(inputs: NormLinearInputs, widths: tuple[int, ...], options: NormLinearOptions) -> Result:
    """Computes statistics and gradients of parameters in float32."""
    if not torch.is_grad_enabled():
        joined = forward(inputs, options)
        if options.silu:
            joined = F.silu(joined, inplace=True)
        return Result(tuple(joined.split(widths, dim=1)), inputs.x, None)
    grad_buffer = GradientBuffer(widths)
    residual, *parts = NormLinear.apply(*inputs, grad_buffer, options)
    return Result(tuple(parts), residual, grad_buffer)


def forward(inputs: NormLinearInputs, options: NormLinearOptions) -> Tensor:
    """Computes the projection [T, N] without gradients."""
    return linear(launch_norm(*inputs[:3], options.eps, options.dtype), inputs.weight, inputs.bias)


class NormLinear(torch.autograd.Function):
    """Autograd function, called as `apply(*inputs, grad_buffer, options)`; returns x and the parts."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        x, norm_weight, norm_bias, weight, bias, grad_buffer, options = arguments
        normed = launch_norm(x, norm_weight, norm_bias, options.eps, options.dtype)
        rounded = weight.to(options.dtype)
        joined, before = F.linear(normed, rounded, bias.to(options.dtype)), None
        if options.silu:
            before, joined = joined, F.silu(joined)
        kept = normed if options.keep_normed else None
        ctx.save_for_backward(x, kept, norm_weight, norm_bias, rounded, before)
        ctx.grad_buffer, ctx.eps, ctx.parameter_dtype = grad_buffer, options.eps, weight.dtype
        return (x, *joined.split(grad_buffer.widths, dim=1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_x: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, norm_weight, norm_bias, weight, before = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad = ctx.grad_buffer.joined(gradients)
        if before is not None:
            grad = torch.ops.aten.silu_backward(grad, before)
        if normed is None and needed[3]:
            normed = launch_norm(x, norm_weight, norm_bias, ctx.eps, grad.dtype)
        grad_weight = weight_gradient(grad, normed, ctx.parameter_dtype) if needed[3] else None
        del normed
        grad_bias = column_sums(grad).to(ctx.parameter_dtype) if needed[4] else None
        grad_x, both = launch_norm_backward(grad @ weight, x, grad_x, norm_weight, ctx.eps)
        return (grad_x, *both.unbind(0), grad_weight, grad_bias, None, None)


def launch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Launches `forward_kernel` and returns norm(x) [T, E] in `dtype`."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    x, blocks = with_dense_rows(x), forward_blocks(width)
    launch(
        forward_kernel,
        (num_rows + blocks.rows - 1) // blocks.rows,
        (x, weight.contiguous(), bias.contiguous(), out),
        (num_rows,),
        {"STRIDE": x.stride(0), **_constants(width, eps, blocks)},
    )
    return out


def launch_norm_backward(
    grad_normed: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Launches `backward_kernel` and returns the gradient of x with `residual` added, and those of weight and
    bias as [2, E]."""
    num_rows, width = x.shape
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return grad_x, weight.new_zeros(2, width)
    x, residual, blocks = with_dense_rows(x), with_dense_rows(residual), backward_blocks(width)
    workers = max(1, WORKERS_PER_PROCESSOR * num_processors(x.device))
    sums = torch.empty(workers, 2, width, dtype=torch.float32, device=x.device)
    launch(
        backward_kernel,
        workers,
        (grad_normed.contiguous(), x, residual, weight.contiguous(), grad_x, sums),
        (num_rows, workers),
        {"STRIDE": x.stride(0), "STRIDE_R": residual.stride(0), **_constants(width, eps, blocks)},
    )
    return grad_x, sum_of_parts(sums).to(weight.dtype)


def forward_blocks(width: int) -> RowBlocks:
    """Chooses blocks of whole rows, with several rows if they are short."""
    return row_blocks(width, FORWARD_ENTRIES, ENTRIES_PER_WARP, LEAST_WARPS)


def backward_blocks(width: int) -> RowBlocks:
    """Chooses blocks of whole rows, with several rows if they are short."""
    entries = BACKWARD_ENTRIES if width <= SHORT else FEWER_ENTRIES
    return row_blocks(width, entries, ENTRIES_PER_WARP, LEAST_WARPS)


def _constants(width: int, eps: float, blocks: RowBlocks) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels, by the names of their parameters."""
    return {
        "W": int(width),
        "BLOCK_M": blocks.rows,
        "BLOCK": blocks.columns,
        "EPS": eps,
        "num_warps": blocks.num_warps,
    }


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x, weight, bias, out, num_rows,
    STRIDE: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Writes out [T, W], contiguous; rows of x are STRIDE elements apart. One program runs per BLOCK_M
    rows."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < W)
    long_row = row.to(tl.int64)
    given = tl.load(x + long_row * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    y, _ = normed(given, inside, W, EPS)
    scale = tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < W, other=0.0).to(tl.float32)
    tl.store(out + long_row * W + column, y * scale + shift, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def backward_kernel(
    grad_n, x, residual, weight, grad_x, sums, num_rows, num_workers,
    STRIDE: tl.constexpr, STRIDE_R: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Writes grad_x [T, W], contiguous like grad_n, and sums [num_workers, 2, W] float32: dw and db over the
    rows of each worker.

    A worker takes every num_workers-th block of rows. `residual`, with rows STRIDE_R elements apart, is added
    to grad_x.
    """
    worker = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)
    grad_scale = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    grad_shift = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    row = worker * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (row < num_rows) & (column < W)
    long_row = row.to(tl.int64)
    next_x = tl.load(x + long_row * STRIDE + column, mask=inside, other=0.0)
    next_grad = tl.load(grad_n + long_row * W + column, mask=inside, other=0.0)
    next_added = tl.load(residual + long_row * STRIDE_R + column, mask=inside, other=0.0)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        given, grad = next_x.to(tl.float32), next_grad.to(tl.float32)
        added = next_added.to(tl.float32)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (column < W)
        # Load the next block while computing this one.
        next_row = row.to(tl.int64) + num_workers * BLOCK_M
        next_inside = (next_row < num_rows) & (column < W)
        next_x = tl.load(x + next_row * STRIDE + column, mask=next_inside, other=0.0)
        next_grad = tl.load(grad_n + next_row * W + column, mask=next_inside, other=0.0)
        next_added = tl.load(residual + next_row * STRIDE_R + column, mask=next_inside, other=0.0)
        y, deviation = normed(given, inside, W, EPS)
        grad_scale += y * grad
        grad_shift += grad
        grad_y = scale * grad
        mean = tl.sum(grad_y, 1, keep_dims=True) / W
        along = tl.sum(grad_y * y, 1, keep_dims=True) / W
        total = (grad_y - mean - y * along) * deviation + added
        tl.store(grad_x + row.to(tl.int64) * W + column, total, mask=inside)
    pointer = sums + worker.to(tl.int64) * (2 * W) + column
    tl.store(pointer, tl.sum(grad_scale, 0, keep_dims=True), mask=column < W)
    tl.store(pointer + W, tl.sum(grad_shift, 0, keep_dims=True), mask=column < W)
