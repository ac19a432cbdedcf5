"""Launches the kernels of `gated_norm`: an autograd function for eager mode, library ops for graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.gated_norm import GateInputs, GateOptions, counter
from recsys.ops.gated_norm.triton_kernels import backward_kernel, forward_kernel
from recsys.ops.runtime.column_sums import sum_of_parts
from recsys.ops.runtime.gradient_buffer import GradientBuffer
from recsys.ops.runtime.launch import Wrap, launch
from recsys.ops.runtime.registration import differentiable, flat_signature, saving, traceable_op
from recsys.ops.runtime.row_blocks import RowBlocks, row_blocks, with_dense_rows
from recsys.ops.runtime.triton_support import num_processors

ENTRIES = 2048
"""Entries per program's block, rows x columns, unless a single row has more."""

ENTRIES_PER_WARP, ENTRIES_PER_WARP_OF_FIVE = 512, 256
"""Entries per warp that fit into the registers: usually, and where backward loads five tensors."""

WORKERS_PER_PROCESSOR = 2
"""Programs of the backward kernel per multiprocessor; each sums gradients of the parameters over its rows."""


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
    if num_rows == 0:
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
    if num_rows == 0:
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
