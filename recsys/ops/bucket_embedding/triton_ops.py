"""Launches the kernels of `bucket_embedding`; has the autograd functions, and a library op for graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.bucket_embedding.segments import Segments, launch_sums
from recsys.ops.jagged.triton_ops import blocks_of, dense_rows, step_of
from recsys.ops.runtime.launch import launch
from recsys.ops.runtime.registration import traceable_op

MAX_TABLES = 2
"""Most tables per launch; further launches add more."""

KEYS = ((254, torch.uint8), (2**15 - 2, torch.int16), (2**31 - 2, torch.int32), (2**63 - 2, torch.int64))
"""Most buckets for each dtype of sort keys, which also hold one key below and one above them; short keys sort
faster."""


class BucketEmbedding(torch.autograd.Function):
    """Autograd function, called as `apply(x, scale, buckets, *tables)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, buckets: Sequence[Tensor], *tables: Tensor) -> Tensor:
        ctx.save_for_backward(*buckets)
        ctx.scale, ctx.dtype = scale, x.dtype
        ctx.tables = [(table.shape[0], table.dtype) for table in tables]
        return launch_embed(x, tables, buckets, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _scaled(grad_out, ctx.scale, ctx.dtype)
        grad_out = dense_rows(grad_out, grad_out.shape[1])
        grads = [
            launch_sums(grad_out, sorted_by_bucket(buckets, size), dtype) if needed else None
            for buckets, (size, dtype), needed in zip(
                ctx.saved_tensors, ctx.tables, ctx.needs_input_grad[3:], strict=True
            )
        ]
        return (grad_x, None, None, *grads)


class LookUp(torch.autograd.Function):
    """Autograd function, called as `apply(table, buckets)`: looks up rows of a table in a traced graph."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, buckets: Tensor) -> Tensor:
        ctx.save_for_backward(buckets)
        ctx.size, ctx.dtype = table.shape[0], table.dtype
        return torch.nn.functional.embedding(buckets, table)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (buckets,) = ctx.saved_tensors
        return sum_by_bucket_triton(grad_out, buckets, ctx.size).to(ctx.dtype), None


def _scaled(grad: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns `scale * grad` in `dtype`, rounded once, in one pass over memory."""
    if scale == 1:
        return grad.to(dtype)
    return torch.mul(grad, scale, out=grad.new_empty(grad.shape, dtype=dtype))


def launch_embed(x: Tensor, tables: Sequence[Tensor], buckets: Sequence[Tensor], scale: float) -> Tensor:
    """Launches `embed_kernel` and returns [T, E]. The arguments have been validated."""
    num_rows, width = x.shape
    dtype = reduce(torch.promote_types, (table.dtype for table in tables), x.dtype)
    out = x.new_empty(num_rows, width, dtype=dtype)
    if num_rows == 0 or width == 0:
        return out
    now, later = tables[:MAX_TABLES], tables[MAX_TABLES:]
    rows, first, last = (dense_rows(tensor, width) for tensor in (x, now[0], now[-1]))
    blocks = blocks_of(width, dtype.itemsize)
    strides = (rows.stride(0), first.stride(0), last.stride(0))
    launch(
        embed_kernel,
        blocks.programs(num_rows, width),
        (rows, first, last, buckets[0].contiguous(), buckets[len(now) - 1].contiguous(), out),
        (num_rows, first.shape[0], last.shape[0], *strides),
        {
            "W": width,
            **blocks.constants(),
            "TABLES": len(now),
            "SCALE": scale,
            "STEP": step_of(strides),
            "num_warps": blocks.num_warps,
        },
    )
    return launch_embed(out, later, buckets[MAX_TABLES:], 1.0) if later else out


def sorted_by_bucket(buckets: Tensor, num_buckets: int) -> Segments:
    """Sorts rows [T] by bucket; rows of the same bucket keep their order."""
    dtype = next(dtype for limit, dtype in KEYS if num_buckets <= limit)
    # Buckets outside the table stay outside: -1 (255 as uint8) and num_buckets.
    keys, order = torch.sort(buckets.clamp(-1, num_buckets).to(dtype), stable=True)
    numbers = torch.arange(num_buckets + 1, dtype=dtype, device=keys.device)
    return Segments(keys, torch.searchsorted(keys, numbers), order)


@traceable_op("sum_by_bucket_triton")
def sum_by_bucket_triton(values: Tensor, buckets: Tensor, num_buckets: int) -> Tensor:
    """Returns the sums, float32 [num_buckets, E], of the rows of values [T, E] in each bucket, for traced
    graphs."""
    return launch_sums(values, sorted_by_bucket(buckets, num_buckets), torch.float32, wrap_triton)


@triton.jit
def _vectors(
    table, buckets, row, inside, place, size, stride, W: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Loads float32 [rows, columns] of a table, zeros for buckets outside it."""
    bucket = tl.load(buckets + row, mask=inside, other=-1).to(tl.int64)
    pointer = table + bucket * (stride // STEP * STEP) + place
    known = (bucket >= 0) & (bucket < size)
    return tl.load(pointer, mask=known & (place < W), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "size_0", "size_1", "stride_x", "stride_0", "stride_1"])
def embed_kernel(
    x, table_0, table_1, buckets_0, buckets_1, out,
    num_rows, size_0, size_1, stride_x, stride_0, stride_1,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TABLES: tl.constexpr, SCALE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Writes out [num_rows, W], contiguous; blocks of columns vary fastest."""
    COLUMNS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // COLUMNS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    place = (tl.program_id(0) % COLUMNS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = row < num_rows
    pointer = x + row * (stride_x // STEP * STEP) + place
    total = tl.load(pointer, mask=inside & (place < W), other=0.0).to(tl.float32) * SCALE
    total += _vectors(table_0, buckets_0, row, inside, place, size_0, stride_0, W, STEP)
    if TABLES > 1:
        total += _vectors(table_1, buckets_1, row, inside, place, size_1, stride_1, W, STEP)
    tl.store(out + row * W + place, total, mask=inside & (place < W))
