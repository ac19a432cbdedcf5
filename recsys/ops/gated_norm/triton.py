"""Kernels and launches of `gated_norm`: an autograd function for eager mode, library ops for graphs.

The kernels compute norm, gate and dropout for a group of columns, forward and backward, in float32:

    y = u n,    n = x w + b,    x = (a - mean) / sqrt(variance + eps)
    dn = u dy,  du = n dy,      dx = w dn,      da = (dx - mean(dx) - x mean(x dx)) / sqrt(variance + eps)
    dw = sum over rows of x dn, db = sum over rows of dn

With CONCAT the output is [u, a, y]; du and da then include the gradients of their copies. Dropout acts on the
output, so backward drops the same entries of the output's gradient. With SILU, the argument u is the value
before its activation. Backward computes statistics, activation and random bits again, which is cheaper than
reading them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.gated_norm import GateInputs, GateOptions
from recsys.ops.gated_norm import reference as counter
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.column_sums import RowBlocks, normed, row_blocks, sum_of_parts, with_dense_rows
from recsys.ops.runtime.launch import Wrap, is_zero, launch
from recsys.ops.runtime.registration import differentiable, flat_signature, saving, traceable_op
from recsys.ops.runtime.triton_support import num_processors

ENTRIES = 2048
"""Entries per program's block, rows x columns, unless a single row has more."""

ENTRIES_PER_WARP, ENTRIES_PER_WARP_OF_FIVE = 512, 256
"""Entries per warp that fit into the registers: usually, and where backward loads five tensors."""

WORKERS_PER_PROCESSOR = 2
"""Programs of the backward kernel per multiprocessor; each sums gradients of the parameters over its rows."""


def run(inputs: GateInputs, grad_buffer: GradientBuffer | None, options: GateOptions) -> Tensor:
    """Computes in float32. Backward reads a, u and the gradient once; forward stores nothing else."""
    if torch.compiler.is_compiling():
        return gated_norm_triton(*inputs, *options)
    return GatedNorm.apply(*inputs, grad_buffer, options)


class GatedNorm(torch.autograd.Function):
    """Autograd function, called as `apply(*inputs, grad_buffer, options)`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.grad_buffer, ctx.options = arguments
        ctx.save_for_backward(*inputs)
        return launch_forward(GateInputs(*inputs), ctx.options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = GateInputs(*ctx.saved_tensors)
        grads = launch_backward(grad_out, inputs, ctx.options, grad_buffer=ctx.grad_buffer)
        return (grads.attended, grads.u, *grads.parameters.unbind(0), None, None, None)


class GateGrads(NamedTuple):
    """Gradients of the arguments."""

    attended: Tensor
    u: Tensor
    parameters: Tensor  # [2, W], those of weight and bias


def launch_forward(inputs: GateInputs, options: GateOptions, wrap: Wrap | None = None) -> Tensor:
    """Launches `forward_kernel` and returns [T, W] or [T, 3 W]. The inputs have been validated."""
    attended, u, weight, bias, seed = inputs
    num_rows, width = attended.shape
    columns = 3 * width if options.concat else width
    out = torch.empty(num_rows, columns, dtype=attended.dtype, device=attended.device)
    if is_zero(num_rows):
        return out
    attended, u = map(with_dense_rows, (attended, u))
    blocks = row_blocks(width // options.num_groups, ENTRIES, ENTRIES_PER_WARP, 1)
    launch(
        forward_kernel,
        (num_rows + blocks.rows - 1) // blocks.rows * options.num_groups,
        (attended, u, weight.contiguous(), bias.contiguous(), attended if seed is None else seed, out),
        (num_rows,),
        {
            "STRIDE_A": int(attended.stride(0)),
            "STRIDE_U": int(u.stride(0)),
            **_constants(width, options, blocks),
        },
        wrap,
    )
    return out


def launch_backward(
    grad_out: Tensor,
    inputs: GateInputs,
    options: GateOptions,
    wrap: Wrap | None = None,
    grad_buffer: GradientBuffer | None = None,
) -> GateGrads:
    """Computes the gradients, that of `u` in the buffer, if there is one."""
    attended, u, weight, bias, seed = inputs
    num_rows, width = attended.shape
    grad_a = torch.empty_like(attended, memory_format=torch.contiguous_format)
    grad_u = (
        grad_buffer.place(u) if grad_buffer else torch.empty_like(u, memory_format=torch.contiguous_format)
    )
    if is_zero(num_rows):
        return GateGrads(grad_a, grad_u, weight.new_zeros(2, width))
    grad_out, attended, u = map(with_dense_rows, (grad_out, attended, u))
    per_warp = ENTRIES_PER_WARP_OF_FIVE if options.concat else ENTRIES_PER_WARP
    blocks = row_blocks(width // options.num_groups, ENTRIES, per_warp, 1)
    workers = max(1, WORKERS_PER_PROCESSOR * num_processors(attended.device) // options.num_groups)
    sums = torch.empty(workers, 2, width, dtype=torch.float32, device=attended.device)
    strides = {
        "STRIDE_O": int(grad_out.stride(0)),
        "STRIDE_A": int(attended.stride(0)),
        "STRIDE_U": int(u.stride(0)),
        "STRIDE_GU": int(grad_u.stride(0)),
    }
    tensors = (
        grad_out,
        attended,
        u,
        weight.contiguous(),
        bias.contiguous(),
        attended if seed is None else seed,
    )
    launch(
        backward_kernel,
        workers * options.num_groups,
        (*tensors, grad_a, grad_u, sums),
        (num_rows, workers),
        strides | _constants(width, options, blocks),
        wrap,
    )
    both = sum_of_parts(sums) if wrap is None else sums.sum(0)
    return GateGrads(grad_a, grad_u, both.to(weight.dtype))


def _constants(width: int, options: GateOptions, blocks: RowBlocks) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels, by the names of their parameters."""
    return {
        "W": int(width),
        "GROUP": int(width) // options.num_groups,
        "BLOCK_M": blocks.rows,
        "BLOCK": blocks.columns,
        "CONCAT": options.concat,
        "EPS": options.eps,
        "THRESHOLD": counter.threshold(options.dropout),
        "SCALE": 1 / (1 - options.dropout),
        "SILU": options.silu,
        "num_warps": blocks.num_warps,
    }


@traceable_op("gated_norm_triton")
@flat_signature(GateInputs, GateOptions, returns=Tensor)
def gated_norm_triton(*arguments: Any) -> Tensor:
    """Computes `gated_norm` for traced graphs."""
    return launch_forward(GateInputs(*arguments[:5]), GateOptions(*arguments[5:]), wrap_triton)


@traceable_op("gated_norm_triton_backward")
@flat_signature({"grad_out": Tensor}, GateInputs, GateOptions, returns=tuple[Tensor, Tensor, Tensor, Tensor])
def gated_norm_triton_backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of `attended`, `u`, `weight` and `bias`."""
    inputs, options = GateInputs(*arguments[:5]), GateOptions(*arguments[5:])
    grads = launch_backward(grad_out, inputs, options, wrap_triton)
    return grads.attended, grads.u, grads.parameters[0].clone(), grads.parameters[1].clone()


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = gated_norm_triton_backward(grad_out, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, None, *(None for _ in ctx.rest))


differentiable(gated_norm_triton, _backward, saving(5))


# Kernels can read module constants only as constexpr.
FIRST_MULTIPLIER = tl.constexpr(counter.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(counter.MULTIPLIERS[1])
FIRST_SHIFT = tl.constexpr(counter.SHIFTS[0])
SECOND_SHIFT = tl.constexpr(counter.SHIFTS[1])
THIRD_SHIFT = tl.constexpr(counter.SHIFTS[2])
COLUMN_STEP = tl.constexpr(counter.COLUMN_STEP)


@triton.jit
def _mix(bits):
    """Computes the `mix` of `reference` on uint32."""
    bits = (bits ^ (bits >> FIRST_SHIFT)) * tl.cast(FIRST_MULTIPLIER, tl.uint32)
    bits = (bits ^ (bits >> SECOND_SHIFT)) * tl.cast(SECOND_MULTIPLIER, tl.uint32)
    return bits ^ (bits >> THIRD_SHIFT)


@triton.jit
def _keys(seed, row):
    """Returns the keys of rows, uint32, from which the random bits of their entries follow."""
    seed = tl.load(seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return _mix(_mix(row.to(tl.uint32) ^ low) + high)


@triton.jit
def _dropped(value, keys, column, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """Returns `value` after dropout; `column` counts columns of the output."""
    if SCALE == 1.0:
        return value
    else:
        bits = _mix(keys + column.to(tl.uint32) * tl.cast(COLUMN_STEP, tl.uint32))
        return tl.where(bits >= tl.cast(THRESHOLD, tl.uint32), value * SCALE, 0.0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    attended, u, weight, bias, seed, out, num_rows,
    STRIDE_A: tl.constexpr, STRIDE_U: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    CONCAT: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes out [T, W] or [T, 3 W], contiguous. One program runs per group and BLOCK_M rows, groups
    fastest."""
    GROUPS: tl.constexpr = W // GROUP
    row = (tl.program_id(0) // GROUPS) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    column = (tl.program_id(0) % GROUPS) * GROUP + place
    inside = (row < num_rows) & (place < GROUP)
    long_row = row.to(tl.int64)
    a = tl.load(attended + long_row * STRIDE_A + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(u + long_row * STRIDE_U + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        factor *= _sigmoid(factor)
    x, _ = normed(a, inside, GROUP, EPS)
    scale = tl.load(weight + column, mask=place < GROUP, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=place < GROUP, other=0.0).to(tl.float32)
    y = factor * (x * scale + shift)
    keys = row.to(tl.uint32)
    if SCALE != 1.0:
        keys = _keys(seed, row)
    if CONCAT:
        pointer = out + long_row * (3 * W) + column
        tl.store(pointer, _dropped(factor, keys, column, THRESHOLD, SCALE), mask=inside)
        tl.store(pointer + W, _dropped(a, keys, column + W, THRESHOLD, SCALE), mask=inside)
        tl.store(pointer + 2 * W, _dropped(y, keys, column + 2 * W, THRESHOLD, SCALE), mask=inside)
    else:
        tl.store(out + long_row * W + column, _dropped(y, keys, column, THRESHOLD, SCALE), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def backward_kernel(
    grad_out, attended, u, weight, bias, seed, grad_a, grad_u, sums, num_rows, num_workers,
    STRIDE_O: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_U: tl.constexpr, STRIDE_GU: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    CONCAT: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes grad_a [T, W], contiguous, grad_u [T, W], and sums [num_workers, 2, W] float32: dw and db over
    the rows of each worker.

    Each group has `num_workers` workers, groups fastest; a worker takes every num_workers-th block of rows.
    """
    GROUPS: tl.constexpr = W // GROUP
    worker = tl.program_id(0) // GROUPS
    place = tl.arange(0, BLOCK)[None, :]
    column = (tl.program_id(0) % GROUPS) * GROUP + place
    scale = tl.load(weight + column, mask=place < GROUP, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=place < GROUP, other=0.0).to(tl.float32)
    grad_scale = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    grad_shift = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    # The column of y in the output. With CONCAT the copies of u and a are 2 W and W columns before it.
    in_out = column + 2 * W if CONCAT else column
    row = worker * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (row < num_rows) & (place < GROUP)
    long_row = row.to(tl.int64)
    next_a = tl.load(attended + long_row * STRIDE_A + column, mask=inside, other=0.0)
    next_u = tl.load(u + long_row * STRIDE_U + column, mask=inside, other=0.0)
    given = grad_out + long_row * STRIDE_O + in_out
    next_y = tl.load(given, mask=inside, other=0.0)
    if CONCAT:
        next_to_u = tl.load(given - 2 * W, mask=inside, other=0.0)
        next_to_a = tl.load(given - W, mask=inside, other=0.0)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        a, factor, grad_y = next_a.to(tl.float32), next_u.to(tl.float32), next_y.to(tl.float32)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (place < GROUP)
        long_row = row.to(tl.int64)
        if CONCAT:
            copied_u, copied_a = next_to_u.to(tl.float32), next_to_a.to(tl.float32)
        # Load the next block while computing this one.
        next_row = long_row + num_workers * BLOCK_M
        next_inside = (next_row < num_rows) & (place < GROUP)
        next_a = tl.load(attended + next_row * STRIDE_A + column, mask=next_inside, other=0.0)
        next_u = tl.load(u + next_row * STRIDE_U + column, mask=next_inside, other=0.0)
        given = grad_out + next_row * STRIDE_O + in_out
        next_y = tl.load(given, mask=next_inside, other=0.0)
        if CONCAT:
            next_to_u = tl.load(given - 2 * W, mask=next_inside, other=0.0)
            next_to_a = tl.load(given - W, mask=next_inside, other=0.0)
        slope = 1.0
        if SILU:
            part = _sigmoid(factor)
            slope = part * (1.0 + factor * (1.0 - part))
            factor *= part
        keys = row.to(tl.uint32)
        if SCALE != 1.0:
            keys = _keys(seed, row)
        grad_y = _dropped(grad_y, keys, in_out, THRESHOLD, SCALE)
        x, deviation = normed(a, inside, GROUP, EPS)
        grad_n = factor * grad_y
        grad_scale += x * grad_n
        grad_shift += grad_n
        grad_x = scale * grad_n
        mean = tl.sum(grad_x, 1, keep_dims=True) / GROUP
        along = tl.sum(grad_x * x, 1, keep_dims=True) / GROUP
        to_a = (grad_x - mean - x * along) * deviation
        to_u = grad_y * (x * scale + shift)
        if CONCAT:
            to_u += _dropped(copied_u, keys, column, THRESHOLD, SCALE)
            to_a += _dropped(copied_a, keys, column + W, THRESHOLD, SCALE)
        tl.store(grad_a + long_row * W + column, to_a, mask=inside)
        tl.store(grad_u + long_row * STRIDE_GU + column, to_u * slope, mask=inside)
    pointer = sums + worker.to(tl.int64) * (2 * W) + column
    tl.store(pointer, tl.sum(grad_scale, 0, keep_dims=True), mask=place < GROUP)
    tl.store(pointer + W, tl.sum(grad_shift, 0, keep_dims=True), mask=place < GROUP)
