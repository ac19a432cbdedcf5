"""Triton kernels of `gather_rows`, their launches, an autograd function and library ops.

Rows are moved as bits. A program has whole rows, or some columns of them; each row of the output has one
owner. STEP divides all strides, so that the compiler can combine neighboring elements in one access.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.jagged.reference import invert_each
from recsys.ops.runtime.launch import Wrap, is_zero, launch
from recsys.ops.runtime.registration import differentiable, traceable_op

MAX_SOURCES = 4
"""Most sources that the kernel takes; if there are more, the last ones are concatenated."""

BLOCK_BYTES = 1 << 14
"""Bytes per program's block, rows x columns."""

MOST_ROWS = 1024
"""Most rows per block."""

LONGEST_BLOCK = 1024
"""Most columns per block; a longer row has several blocks."""

SHORTEST_BLOCK = 64
"""Fewest columns per block when looking for a block size that divides the row."""

INVERTED = 1024
"""Map entries that a program inverts."""

MOVABLE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each itemsize in bytes: rows are moved as bits, whatever they mean."""


def run(
    values: Sequence[Tensor], index: Sequence[Tensor], inverse: Tensor | None, *, complete: bool = False
) -> Tensor:
    """Move rows without concatenating sources, forward and backward; `complete` makes no difference."""
    joined = index[0] if len(index) == 1 else torch.cat(list(index))
    if torch.compiler.is_compiling():
        return gather_rows_triton(list(values), joined, inverse, [tensor.shape[0] for tensor in index])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in values):
        return GatherRows.apply(joined, inverse, [tensor.shape[0] for tensor in index], *values)
    return launch_gather(values, joined)


class Blocks(NamedTuple):
    """Block sizes of a kernel."""

    rows: int  # BLOCK_M, rows per block
    columns: int  # BLOCK, columns per block
    num_warps: int = 4

    def programs(self, num_rows: int, width: int) -> int:
        """Return how many programs cover [num_rows, width]."""
        return (num_rows + self.rows - 1) // self.rows * -(-width // self.columns)

    def constants(self) -> dict[str, int]:
        """Return the constants by the names of the kernels' parameters."""
        return {"BLOCK_M": self.rows, "BLOCK": self.columns}


class GatherRows(torch.autograd.Function):
    """Autograd function, called as `apply(index, inverse, sizes, *values)`; `sizes` of the maps in
    `index`."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, inverse: Tensor | None, sizes: list[int], *values: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.sizes, ctx.rows = sizes, [tensor.shape[0] for tensor in values]
        return launch_gather(values, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        total = sum(ctx.rows)
        if inverse is None:
            inverse = launch_invert(index, ctx.sizes, total)
        grad = launch_sum(grad_out, inverse, total)
        return (None, None, None, *grad.split(ctx.rows))


def launch_gather(values: Sequence[Tensor], index: Tensor, wrap: Wrap | None = None) -> Tensor:
    """Gather rows into [N, ...]; the arguments have been validated."""
    first, num_out = values[0], index.shape[0]
    width = width_of(first)
    out = first.new_empty((num_out, *first.shape[1:]))
    if is_zero(num_out) or width == 0:
        return out
    rows = [_movable(tensor, width) for tensor in _few(values)]
    plan = _plan(width, first.element_size(), tuple([int(tensor.stride(0)) for tensor in rows]))
    missing = MAX_SOURCES - len(rows)
    ends = accumulate([tensor.shape[0] for tensor in rows])
    launch(
        gather_kernel,
        plan.programs(num_out),
        (index.contiguous(), *rows, *[rows[0]] * missing, _movable(out, width)),
        (num_out, *ends, *[0] * missing, *plan.strides, *[0] * missing),
        plan.constants,
        wrap,
    )
    return out


def launch_sum(given: Tensor, places: Tensor, num_rows: int, wrap: Wrap | None = None) -> Tensor:
    """Return [num_rows, ...], the sums of the rows `places[k, t]` of `given`; places [num_rows] or [K,
    num_rows]."""
    if places.dim() == 1 or places.shape[0] == 1:
        return launch_gather([given], places.flatten(), wrap)
    width = width_of(given)
    out = given.new_empty((num_rows, *given.shape[1:]))
    if is_zero(num_rows) or width == 0:
        return out
    rows = dense_rows(given, width)
    blocks, step = blocks_of(width, 4), step_of([int(rows.stride(0))])
    launch(
        sum_kernel,
        blocks.programs(num_rows, width),
        (places.contiguous(), rows, out),
        (num_rows, places.shape[0], rows.shape[0], rows.stride(0)),
        {"W": width, **blocks.constants(), "STEP": step, "num_warps": blocks.num_warps},
        wrap,
    )
    return out


def launch_invert(index: Tensor, sizes: Sequence[int], num_rows: int) -> Tensor:
    """Compute `reference.invert_each` with one launch per map. Not for traced code."""
    out = torch.full((len(sizes), num_rows), -1, dtype=torch.int64, device=index.device)
    index, before = index.contiguous(), 0
    for number, size in enumerate(sizes):
        if size:
            launch(
                invert_kernel,
                -(-size // INVERTED),
                (index, out),
                (before, size, num_rows, number),
                {"BLOCK": INVERTED, "num_warps": 4},
            )
        before += size
    return out


class _Plan(NamedTuple):
    """Constants of `gather_kernel` that follow from the shape of a row and the strides of the sources."""

    width: int
    blocks: Blocks
    strides: tuple[int, ...]
    constants: dict[str, Any]

    def programs(self, num_rows: int) -> int:
        return self.blocks.programs(num_rows, self.width)


@lru_cache(maxsize=1024)
def _plan(width: int, itemsize: int, strides: tuple[int, ...]) -> _Plan:
    blocks = blocks_of(width, itemsize)
    constants = {"W": width, **blocks.constants(), "SOURCES": len(strides), "STEP": step_of(strides)}
    return _Plan(width, blocks, strides, {**constants, "num_warps": blocks.num_warps})


def width_of(tensor: Tensor) -> int:
    """Return the number of entries in a row of [T, ...]."""
    return int(prod(tensor.shape[1:]))


def blocks_of(width: int, itemsize: int) -> Blocks:
    """Choose blocks: whole rows, several if they are short; parts of long rows, equal if possible."""
    columns = min(1 << (width - 1).bit_length(), LONGEST_BLOCK)
    even = columns
    while even >= SHORTEST_BLOCK and width % even:
        even //= 2
    if even >= SHORTEST_BLOCK:
        columns = even
    return Blocks(max(1, min(MOST_ROWS, BLOCK_BYTES // itemsize // columns)), columns)


def step_of(strides: Sequence[int]) -> int:
    """Return the largest power of two up to 16 that divides all numbers."""
    step = 16
    while any(stride % step for stride in strides):
        step //= 2
    return step


def dense_rows(tensor: Tensor, width: int) -> Tensor:
    """Return [T, ...] with any stride between rows and contiguous rows; a copy [T, width] if need be."""
    dim = tensor.dim()
    if dim == 1 or (tensor.stride(1) == 1 or width == 1 if dim == 2 else tensor.is_contiguous()):
        return tensor
    rows = tensor.reshape(tensor.shape[0], width)
    return rows if width == 1 or rows.stride(1) == 1 else rows.contiguous()


def _movable(tensor: Tensor, width: int) -> Tensor:
    """Return dense rows in a dtype that Triton supports."""
    rows = dense_rows(tensor, width)
    return rows if rows.dtype in MOVABLE else rows.view(BITS[rows.element_size()])


def _few(values: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(values) <= MAX_SOURCES:
        return values
    return [*values[: MAX_SOURCES - 1], torch.cat(list(values[MAX_SOURCES - 1 :]))]


@traceable_op("gather_rows_triton")
def gather_rows_triton(
    values: list[Tensor], index: Tensor, inverse: Tensor | None, sizes: list[int]
) -> Tensor:
    """Run `gather_rows` in traced graphs."""
    return launch_gather(values, index, wrap_triton)


@traceable_op("gather_rows_triton_backward")
def gather_rows_triton_backward(grad_out: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Compute the gradients of all `values`, concatenated."""
    return launch_sum(grad_out, places, num_rows, wrap_triton)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, inverse, sizes = inputs
    ctx.save_for_backward(index, inverse)
    ctx.sizes, ctx.rows = sizes, [tensor.shape[0] for tensor in values]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    index, inverse = ctx.saved_tensors
    total = sum(ctx.rows)
    if inverse is None:
        inverse = invert_each(index, ctx.sizes, total)
    grad = gather_rows_triton_backward(grad_out, inverse, total)
    return list(grad.split(ctx.rows)), None, None, None


differentiable(gather_rows_triton, _backward, _setup_context)


@triton.jit(
    do_not_specialize=[
        "num_out", "end_0", "end_1", "end_2", "end_3", "stride_0", "stride_1", "stride_2", "stride_3",
    ]
)  # fmt: skip
def gather_kernel(
    index, source_0, source_1, source_2, source_3, out,
    num_out, end_0, end_1, end_2, end_3, stride_0, stride_1, stride_2, stride_3,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write out [num_out, W], contiguous: row `index[n]` of all sources, zeros if there is no such row.

    Source s has rows `end_{s - 1}` to `end_s - 1`. Blocks of columns vary fastest.
    """
    COLUMNS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // COLUMNS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    place = (tl.program_id(0) % COLUMNS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    wanted = tl.load(index + row, mask=row < num_out, other=-1).to(tl.int64)
    pointer = source_0 + wanted * (stride_0 // STEP * STEP)
    last = end_0
    if SOURCES > 1:
        pointer = tl.where(wanted < end_0, pointer, source_1 + (wanted - end_0) * (stride_1 // STEP * STEP))
        last = end_1
    if SOURCES > 2:
        pointer = tl.where(wanted < end_1, pointer, source_2 + (wanted - end_1) * (stride_2 // STEP * STEP))
        last = end_2
    if SOURCES > 3:
        pointer = tl.where(wanted < end_2, pointer, source_3 + (wanted - end_2) * (stride_3 // STEP * STEP))
        last = end_3
    known = (wanted >= 0) & (wanted < last)
    value = tl.load(pointer + place, mask=known & (place < W), other=0)
    tl.store(out + row * W + place, value, mask=(row < num_out) & (place < W))


@triton.jit(do_not_specialize=["num_rows", "num_maps", "num_given", "stride"])
def sum_kernel(
    places, given, out, num_rows, num_maps, num_given, stride,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write out [num_rows, W], contiguous: the sums of the rows `places[k, t]` of `given`, in float32, in the
    order of k; places [num_maps, num_rows], negative for no row."""
    COLUMNS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // COLUMNS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = (tl.program_id(0) % COLUMNS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    for _ in range(num_maps):
        wanted = tl.load(places + row, mask=row < num_rows, other=-1).to(tl.int64)
        pointer = given + wanted * (stride // STEP * STEP) + column
        known = (wanted >= 0) & (wanted < num_given)
        total += tl.load(pointer, mask=known & (column < W), other=0.0).to(tl.float32)
        places += num_rows
    tl.store(out + row * W + column, total, mask=(row < num_rows) & (column < W))


@triton.jit(do_not_specialize=["first", "size", "num_rows", "number"])
def invert_kernel(index, out, first, size, num_rows, number, BLOCK: tl.constexpr):
    """Write out[number] [num_rows]: the place of each row that entries `first` to `first + size - 1` name."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + first + place, mask=place < size, other=-1).to(tl.int64)
    known = (row >= 0) & (row < num_rows)
    tl.store(out + tl.cast(number, tl.int64) * num_rows + row, first + place, mask=known)
