"""A linear layer without gradients, and the gradients of its parameters: of its bias, sums over the rows; of
its weight, a product.

For Triton backends; this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.runtime.launch import launch
from recsys.ops.runtime.triton_support import num_processors

COLUMNS = 128
"""Of a program."""

ROWS = 32
"""That a program adds at a time."""

PROGRAMS_PER_PROCESSOR = 4

PARTS = 128
"""Rows that a program adds at a time where few are left."""


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def sums_kernel(
    given, out, num_rows, num_workers,
    STRIDE: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [num_workers, W] float32: sums over every num_workers-th block of rows, which are STRIDE apart."""
    BLOCKS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    worker = tl.program_id(0) // BLOCKS
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (column < W)
        sums += tl.load(given + row.to(tl.int64) * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + worker.to(tl.int64) * W + column, tl.sum(sums, 0, keep_dims=True), mask=column < W)


def column_sums(given: Tensor) -> Tensor:
    """float32 [W], sums over the rows of [T, W] in an order that depends on T and the device alone."""
    num_rows, width = given.shape
    if num_rows == 0:
        return torch.zeros(width, dtype=torch.float32, device=given.device)
    if given.stride(1) != 1 or given.stride(0) == 0:
        given = given.contiguous()
    constants = constants_of(width, given.stride(0))
    blocks = -(-width // constants["BLOCK"])
    workers = max(1, PROGRAMS_PER_PROCESSOR * num_processors(given.device) // blocks)
    out = torch.empty(workers, width, dtype=torch.float32, device=given.device)
    launch(sums_kernel, workers * blocks, (given, out), (num_rows, workers), constants)
    return sum_of_parts(out)


def sum_of_parts(parts: Tensor) -> Tensor:
    """[...], the sum over the first dimension of float32 [P, ...], contiguous; for tens to thousands of P."""
    shape, width = parts.shape[1:], parts[0].numel()
    out = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    constants = {"STRIDE": width, "W": width, "BLOCK_M": PARTS, "BLOCK": 16, "num_warps": 8}
    launch(sums_kernel, -(-width // 16), (parts, out), (parts.shape[0], 1), constants)
    return out


def constants_of(width: int, stride: int) -> dict[str, int]:
    """What the kernel is compiled for, by the names of its parameters."""
    block = min(COLUMNS, max(16, 1 << (width - 1).bit_length()))
    return {"STRIDE": int(stride), "W": int(width), "BLOCK_M": ROWS, "BLOCK": block, "num_warps": 8}


def linear(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`given @ weight^T + bias` in the type of `given`, without gradients.

    Autocast, where it is on, keeps the parameters that it has rounded: pieces of a batch share them.
    """
    kind, dtype = given.device.type, given.dtype
    if not (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype):
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(given, weight, bias)


def weight_gradient(grad: Tensor, given: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] of type `dtype`: `grad^T @ given`, [T, N] and [T, K], rounded once."""
    if grad.dtype == dtype:
        return grad.t() @ given
    if grad.is_cuda and dtype == torch.float32:
        return torch.mm(grad.t(), given, out_dtype=dtype)
    return (grad.t() @ given).to(dtype)


class LinearAdd(torch.autograd.Function):
    """`apply(x, y, weight, bias)`: x + y @ weight^T + bias.

    The product has the type of y, the sum that of x. Gradients of the parameters are summed in float32. It
    pays within a node that runs several functions; on its own PyTorch's operations cost the host less
    (experiments/2026-11-23-fewer-forms).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = weight.to(y.dtype)
        ctx.save_for_backward(y, rounded)
        ctx.parameter_dtype = weight.dtype
        if bias is None and x.dtype == y.dtype:
            return torch.addmm(x, y, rounded.t())
        branch = F.linear(y, rounded, None if bias is None else bias.to(y.dtype))
        return branch.add_(x) if x.dtype == branch.dtype else x + branch.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad = grad_x.to(y.dtype)
        grad_weight = weight_gradient(grad, y, ctx.parameter_dtype) if needed[2] else None
        grad_bias = column_sums(grad_x).to(ctx.parameter_dtype) if needed[3] else None
        return grad_x, grad @ weight, grad_weight, grad_bias
