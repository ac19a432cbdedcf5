"""Launches of the kernels of `gather_rows`: sources as rows of bits; an autograd function and library ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from recsys.ops.jagged.reference import invert_each
from recsys.ops.jagged.triton_kernels import gather_kernel, sum_kernel

Wrap = Callable[[Any], Any]

MAX_SOURCES = 4
"""Of the kernel: more of them are concatenated up to this number."""

BLOCK_BYTES = 1 << 14
"""Of a program's block, rows x columns."""

MOST_ROWS = 1024
"""Of a block."""

LONGEST_BLOCK = 1024
"""Columns of a block; a longer row has several."""

SHORTEST_BLOCK = 64
"""Columns of a block, if one that divides the row is to be found."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a number: rows are moved, whatever they mean."""


class Blocks(NamedTuple):
    """Sizes for a kernel."""

    rows: int  # BLOCK_M
    columns: int  # BLOCK
    num_warps: int = 4


class GatherRows(torch.autograd.Function):
    """`apply(index, inverse, sizes, *values)`, `sizes` of the single maps of which `index` consists."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, inverse: Tensor | None, sizes: list[int], *values: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.sizes, ctx.rows = sizes, [one.shape[0] for one in values]
        return launch_gather(values, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        total = sum(ctx.rows)
        if inverse is None:
            inverse = invert_each(index, ctx.sizes, total)
        grad = launch_sum(grad_out, inverse, total)
        return (None, None, None, *grad.split(ctx.rows))


def launch_gather(values: Sequence[Tensor], index: Tensor, wrap: Wrap = lambda kernel: kernel) -> Tensor:
    """[N, ...]; the arguments have been validated."""
    first = values[0]
    shape, width = first.shape[1:], int(first.shape[1:].numel())
    out = first.new_empty(index.shape[0], *shape)
    if _is_zero(index.shape[0]) or width == 0:
        return out
    rows = [_rows_of_bits(one, width) for one in _few(values)]
    ends = list(accumulate(one.shape[0] for one in rows))
    missing = MAX_SOURCES - len(rows)
    strides = [one.stride(0) for one in rows]
    blocks = blocks_of(width, first.element_size())
    wrap(gather_kernel)[_grid(index.shape[0], width, blocks)](
        index.contiguous(),
        *rows,
        *[rows[0]] * missing,
        _rows_of_bits(out, width),
        index.shape[0],
        *ends,
        *[0] * missing,
        *strides,
        *[0] * missing,
        W=width,
        BLOCK_M=blocks.rows,
        BLOCK=blocks.columns,
        SOURCES=len(rows),
        STEP=step_of(strides),
        num_warps=blocks.num_warps,
    )
    return out


def launch_sum(given: Tensor, places: Tensor, num_rows: int, wrap: Wrap = lambda kernel: kernel) -> Tensor:
    """[num_rows, ...], the sum of the rows `places[k, t]` of `given`; places [num_rows] or [K, num_rows]."""
    if places.dim() == 1 or places.shape[0] == 1:
        return launch_gather([given], places.flatten(), wrap)
    width = int(given.shape[1:].numel())
    out = given.new_empty(num_rows, *given.shape[1:])
    if _is_zero(num_rows) or width == 0:
        return out
    rows = dense_rows(given, width)
    blocks = blocks_of(width, 4)
    wrap(sum_kernel)[_grid(num_rows, width, blocks)](
        places.contiguous(),
        rows,
        out,
        num_rows,
        places.shape[0],
        rows.shape[0],
        rows.stride(0),
        W=width,
        BLOCK_M=blocks.rows,
        BLOCK=blocks.columns,
        STEP=step_of([rows.stride(0)]),
        num_warps=blocks.num_warps,
    )
    return out


def blocks_of(width: int, itemsize: int) -> Blocks:
    """Whole rows, several if they are short; equal parts of long ones, if there are such."""
    columns = min(1 << (width - 1).bit_length(), LONGEST_BLOCK)
    even = columns
    while even >= SHORTEST_BLOCK and width % even:
        even //= 2
    if even >= SHORTEST_BLOCK:
        columns = even
    return Blocks(max(1, min(MOST_ROWS, BLOCK_BYTES // itemsize // columns)), columns)


def step_of(strides: Sequence[int]) -> int:
    """The largest power of two up to 16 that divides all of them."""
    step = 16
    while any(stride % step for stride in strides):
        step //= 2
    return step


def dense_rows(tensor: Tensor, width: int) -> Tensor:
    """[T, ...] as [T, width] with any stride between rows and none within."""
    rows = tensor.reshape(tensor.shape[0], width)
    return rows if width == 1 or rows.stride(1) == 1 else rows.contiguous()


def _rows_of_bits(tensor: Tensor, width: int) -> Tensor:
    rows = dense_rows(tensor, width)
    return rows.view(BITS[rows.element_size()])


def _few(values: Sequence[Tensor]) -> list[Tensor]:
    if len(values) <= MAX_SOURCES:
        return list(values)
    return [*values[: MAX_SOURCES - 1], torch.cat(list(values[MAX_SOURCES - 1 :]))]


def _grid(num_rows: int, width: int, blocks: Blocks) -> tuple[int]:
    columns = -(-width // blocks.columns)
    return ((num_rows + blocks.rows - 1) // blocks.rows * columns,)


def _is_zero(number: int) -> bool:
    """False for a size that whoever traces has left open."""
    return isinstance(number, int) and number == 0


@triton_op("recsys::gather_rows_triton", mutates_args=())
def gather_rows_triton(
    values: list[Tensor], index: Tensor, inverse: Tensor | None, sizes: list[int]
) -> Tensor:
    """`gather_rows` for traced graphs."""
    return launch_gather(values, index, wrap_triton)


@triton_op("recsys::gather_rows_triton_backward", mutates_args=())
def gather_rows_triton_backward(grad_out: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Gradients of all `values`, one after the other."""
    return launch_sum(grad_out, places, num_rows, wrap_triton)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, inverse, sizes = inputs
    ctx.save_for_backward(index, inverse)
    ctx.sizes, ctx.rows = sizes, [one.shape[0] for one in values]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    index, inverse = ctx.saved_tensors
    total = sum(ctx.rows)
    if inverse is None:
        inverse = invert_each(index, ctx.sizes, total)
    grad = gather_rows_triton_backward(grad_out, inverse, total)
    return list(grad.split(ctx.rows)), None, None, None


gather_rows_triton.register_autograd(_backward, setup_context=_setup_context)
