"""Computes linear layers without gradients, and the gradients of their parameters; has what norms share.

The bias gets sums over the rows, and the weight gets a product. This module needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.runtime.launch import launch
from recsys.ops.runtime.triton_support import block_width, num_processors

COLUMNS = 128
"""Columns per program."""

ROWS = 32
"""Rows that a program accumulates per step."""

PROGRAMS_PER_PROCESSOR = 4
"""Programs per streaming multiprocessor."""

PARTS = 128
"""Partial sums that a program of `sum_of_parts` accumulates per step."""


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def sums_kernel(
    x, out, num_rows, num_workers,
    STRIDE: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes out [num_workers, W] float32: worker n sums every num_workers-th block of rows; rows are STRIDE
    elements apart."""
    BLOCKS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    worker = tl.program_id(0) // BLOCKS
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    for block in range(worker, tl.cdiv(num_rows, BLOCK_M), num_workers):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        inside = (row < num_rows) & (column < W)
        sums += tl.load(x + row.to(tl.int64) * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + worker.to(tl.int64) * W + column, tl.sum(sums, 0, keep_dims=True), mask=column < W)


@triton.jit
def normed(x, inside, W: tl.constexpr, EPS: tl.constexpr):
    """Returns the rows of x less their mean and divided by their deviation, [M, BLOCK], zero outside, and 1 /
    sqrt(variance + eps) [M, 1]; a row has W entries."""
    centred = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / W, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / W + EPS)
    return centred * factor, factor


def column_sums(x: Tensor) -> Tensor:
    """Returns float32 [W], the sums over the rows of [T, W], in an order that depends only on T and the
    device."""
    num_rows, width = x.shape
    if num_rows == 0:
        return torch.zeros(width, dtype=torch.float32, device=x.device)
    if x.stride(1) != 1 or x.stride(0) == 0:
        x = x.contiguous()
    constants = constants_of(width, x.stride(0))
    blocks = -(-width // constants["BLOCK"])
    workers = max(1, PROGRAMS_PER_PROCESSOR * num_processors(x.device) // blocks)
    out = torch.empty(workers, width, dtype=torch.float32, device=x.device)
    launch(sums_kernel, workers * blocks, (x, out), (num_rows, workers), constants)
    return sum_of_parts(out)


def sum_of_parts(parts: Tensor) -> Tensor:
    """Returns [...], the sum over the first dimension of a contiguous float32 [P, ...], for P from tens to
    thousands."""
    shape, width = parts.shape[1:], parts[0].numel()
    out = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    constants = {"STRIDE": width, "W": width, "BLOCK_M": PARTS, "BLOCK": 16, "num_warps": 8}
    launch(sums_kernel, -(-width // 16), (parts, out), (parts.shape[0], 1), constants)
    return out


def constants_of(width: int, stride: int) -> dict[str, int]:
    """Returns the compile-time constants of the kernel, by the names of its parameters."""
    block = min(COLUMNS, block_width(width))
    return {"STRIDE": int(stride), "W": int(width), "BLOCK_M": ROWS, "BLOCK": block, "num_warps": 8}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `x @ weight^T + bias` in the dtype of `x`, without gradients.

    Under autocast PyTorch keeps its rounded copies of the parameters, so that the pieces of a batch share
    them.
    """
    kind, dtype = x.device.type, x.dtype
    if not (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype):
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return F.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `grad^T @ x`, [N, K] in `dtype` from [T, N] and [T, K], rounded once."""
    if grad.dtype == dtype:
        return grad.t() @ x
    if grad.is_cuda and dtype == torch.float32:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return (grad.t() @ x).to(dtype)


class LinearAdd(torch.autograd.Function):
    """Autograd function, called as `apply(x, y, weight, bias)`: x + y @ weight^T + bias.

    The product has the dtype of y, the sum that of x. Gradients of the parameters are summed in float32. It
    pays off inside a node that runs several functions; on its own, PyTorch's operations cost the host less
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


class RowBlocks(NamedTuple):
    """Block sizes of a kernel."""

    rows: int  # BLOCK_M, rows per block
    columns: int  # BLOCK, columns per block, at least those of a row
    num_warps: int


def row_blocks(width: int, entries: int, entries_per_warp: int, least_warps: int) -> RowBlocks:
    """Chooses blocks of about `entries` entries, or of a single row that has more."""
    columns = block_width(width)
    rows = max(1, entries // columns)
    return RowBlocks(rows, columns, max(least_warps, rows * columns // entries_per_warp))


def with_dense_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1 and a nonzero row stride, as kernels require."""
    return tensor if tensor.stride(1) == 1 and tensor.stride(0) != 0 else tensor.contiguous()
