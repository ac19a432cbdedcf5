"""The Triton backend of `bucket_embedding`: one kernel forward, sorted segment sums backward.

The sums add sorted rows by segment in float32, without atomics; a long segment occupies many programs. The
sorted rows are cut into chunks of `piece` rows, independently of the segments. One program sums a segment up
to the end of the chunk in which it begins. If the segment continues, a program per further chunk sums that
chunk's share, and the second kernel adds the shares in order. So the order of a sum depends only on the
segments.

    partial  float32 [2 * chunks, W]: for each chunk, the sum of the first rows of the segment that crosses
             its end; after these, for each chunk, the share of the segment that crosses its start
    bounds   int64 [num_segments + 1]: the first row of each segment, and the end
    segments [num_rows]: the segment of each row; rows outside [0, num_segments) are in no sum
    rows     values, order, and stride of the values; BLOCKS are W, BLOCK_M, BLOCK
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.bucket_embedding import reference
from recsys.ops.jagged.triton import blocks_of, dense_rows, step_of, width_of
from recsys.ops.runtime.dispatch import is_exporting
from recsys.ops.runtime.launch import Wrap, is_zero, launch
from recsys.ops.runtime.registration import traceable_op

MAX_TABLES = 2
"""Most tables per launch; further launches add more."""

KEYS = ((254, torch.uint8), (2**15 - 2, torch.int16), (2**31 - 2, torch.int32), (2**63 - 2, torch.int64))
"""Most buckets for each dtype of sort keys, which also hold one key below and one above them; short keys sort
faster."""


def run(x: Tensor, tables: Sequence[Tensor], buckets: Sequence[Tensor], scale: float) -> Tensor:
    """Computes in float32. In a traced graph the compiler fuses the sum with adjacent operations."""
    if is_exporting():  # no gradient is needed
        return reference.run(x, tables, buckets, scale)
    if not torch.compiler.is_compiling():
        return BucketEmbedding.apply(x, scale, buckets, *tables)
    out = x if scale == 1 else x * scale
    for table, rows in zip(tables, buckets, strict=True):
        out = out + LookUp.apply(table, rows)
    return out


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


ENTRIES = 4096
"""Entries per program's block, rows x columns, with at most `MOST_ROWS` rows."""

MOST_ROWS = 128

LONGEST_BLOCK = 256
"""Most columns per block; a longer row has several blocks."""

SHARE_COLUMNS = 64
"""Columns per block of the second kernel, whose programs spend most of their time waiting."""

SHORT = 8
"""Mean rows per segment below which a program takes several segments."""

SHORT_PIECE = 64
PIECES = 1024
"""Approximate total number of pieces into which long segments are cut, which keeps both kernels short."""

SMALLEST_PIECE, TRACED_PIECE = 64, 256


class Segments(NamedTuple):
    """Rows sorted by segment, for K segments.

    Attributes:
        ids: [n], the segment of each row, sorted; rows outside [0, K) are in no sum.
        bounds: int64 [K + 1], first row of each segment, and the end.
        order: int64 [n], the row of the values at each sorted position.
    """

    ids: Tensor
    bounds: Tensor
    order: Tensor


class Cuts(NamedTuple):
    """Rows per chunk (`piece`) and segments per program (`together`)."""

    piece: int
    together: int


def launch_sums(values: Tensor, segments: Segments, dtype: torch.dtype, wrap: Wrap | None = None) -> Tensor:
    """Returns the sums [K, ...], in `dtype`, of values [n, ...]; the arguments have been validated."""
    num_rows, num_segments = segments.ids.shape[0], segments.bounds.shape[0] - 1
    width = width_of(values)
    out = values.new_empty((num_segments, *values.shape[1:]), dtype=dtype)
    if is_zero(num_segments) or width == 0:
        return out
    rows = dense_rows(values, width)
    block = min(1 << (width - 1).bit_length(), LONGEST_BLOCK)
    cuts = cuts_of(num_rows, num_segments, block)
    whole = num_rows // cuts.piece  # complete chunks; there may be one more that is incomplete
    partial = values.new_empty((2 * (whole + 1), width), dtype=torch.float32)
    groups = (num_segments + cuts.together - 1) // cuts.together
    launch(
        pieces_kernel,
        (groups + whole) * -(-width // block),
        (rows, segments.order, segments.ids, segments.bounds, out, partial),
        (num_rows, num_segments, cuts.piece, rows.stride(0)),
        {
            "W": width,
            "BLOCK_M": rows_of(block),
            "BLOCK": block,
            "STEP": step_of([int(rows.stride(0))]),
            "TOGETHER": cuts.together,
            "num_warps": 4,
        },
        wrap,
    )
    if is_zero(whole):
        return out
    block = min(block, SHARE_COLUMNS)
    launch(
        shares_kernel,
        whole * -(-width // block),
        (segments.ids, segments.bounds, out, partial),
        (num_rows, num_segments, cuts.piece),
        {"W": width, "BLOCK_M": rows_of(block), "BLOCK": block, "num_warps": 4},
        wrap,
    )
    return out


def rows_of(block: int) -> int:
    """Returns the rows of a block with `block` columns; the addresses of more rows would take registers."""
    return max(1, min(MOST_ROWS, (ENTRIES if block == LONGEST_BLOCK else ENTRIES // 2) // block))


def cuts_of(num_rows: int, num_segments: int, block: int) -> Cuts:
    """Returns the cuts that suit the mean length of segments; a traced graph, which may not know it, assumes
    long segments."""
    if not (isinstance(num_rows, int) and isinstance(num_segments, int)):
        return Cuts(TRACED_PIECE, 1)
    if num_rows < SHORT * num_segments:
        return Cuts(SHORT_PIECE, rows_of(block))
    piece = 1 << max(0, num_rows // PIECES - 1).bit_length()
    return Cuts(max(SMALLEST_PIECE, piece), 1)


@triton.jit
def _load_rows(rows, row, inside, column, BLOCKS: tl.constexpr):
    """Loads float32 [rows, columns], zeros where not `inside`."""
    values, order, stride = rows
    W: tl.constexpr = BLOCKS[0]
    row = tl.load(order + row, mask=inside, other=0)
    return tl.load(values + row.to(tl.int64) * stride + column, mask=inside & (column < W), other=0.0).to(
        tl.float32
    )


@triton.jit
def _sum_of(rows, first, stop, column, BLOCKS: tl.constexpr):
    """Returns the sum, float32 [1, BLOCK], of the rows from `first` to `stop` - 1."""
    BLOCK_M: tl.constexpr = BLOCKS[1]
    total = tl.zeros([BLOCK_M, BLOCKS[2]], tl.float32)
    for start in range(first, stop, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)[:, None]
        total += _load_rows(rows, row, row < stop, column, BLOCKS)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def _share(
    rows, segments, bounds, partial, chunk, num_rows, num_segments, piece, column, BLOCKS: tl.constexpr
):  # fmt: skip
    """Stores the chunk's share of the segment that crosses the start of the chunk, if there is one."""
    W: tl.constexpr = BLOCKS[0]
    first = chunk * piece
    segment = tl.load(segments + first, mask=first < num_rows, other=-1).to(tl.int64)
    known = (segment >= 0) & (segment < num_segments)
    if tl.load(bounds + segment, mask=known, other=num_rows) < first:
        stop = tl.minimum(tl.load(bounds + segment + 1), first + piece)
        total = _sum_of(rows, first, stop, column, BLOCKS)
        pointer = partial + (tl.cdiv(num_rows, piece) + chunk) * W + column
        tl.store(pointer, total, mask=column < W)


@triton.jit
def _one_segment(rows, bounds, out, partial, segment, piece, column, BLOCKS: tl.constexpr):
    """Sums one segment, BLOCK_M rows at a time."""
    W: tl.constexpr = BLOCKS[0]
    start, end = tl.load(bounds + segment), tl.load(bounds + segment + 1)
    chunk = start // piece
    stop = tl.minimum(end, (chunk + 1) * piece)
    total = _sum_of(rows, start, stop, column, BLOCKS)
    tl.store(out + segment * W + column, total, mask=(column < W) & (end == stop))
    tl.store(partial + chunk * W + column, total, mask=(column < W) & (end > stop))


@triton.jit
def _several_segments(
    rows, bounds, out, partial, first, num_segments, piece, column,
    BLOCKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Sums TOGETHER segments, taking one row of each per step."""
    W: tl.constexpr = BLOCKS[0]
    segment = first + tl.arange(0, TOGETHER)[:, None]
    inside = segment < num_segments
    start = tl.load(bounds + segment, mask=inside, other=0)
    end = tl.load(bounds + segment + 1, mask=inside, other=0)
    chunk = start // piece
    stop = tl.minimum(end, (chunk + 1) * piece)
    total = tl.zeros([TOGETHER, BLOCKS[2]], tl.float32)
    for step in range(tl.max(stop - start)):
        row = start + step
        total += _load_rows(rows, row, row < stop, column, BLOCKS)
    inside &= column < W
    tl.store(out + segment * W + column, total, mask=inside & (end == stop))
    tl.store(partial + chunk * W + column, total, mask=inside & (end > stop))


@triton.jit(do_not_specialize=["num_rows", "num_segments", "piece", "stride"])
def pieces_kernel(
    values, order, segments, bounds, out, partial, num_rows, num_segments, piece, stride,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Writes out [num_segments, W] for segments that end in the chunk in which they begin; otherwise writes
    their shares.

    One program runs per TOGETHER segments, then one per chunk but the first (or one too many); blocks of
    columns vary fastest.
    """
    COLUMNS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    BLOCKS: tl.constexpr = (W, BLOCK_M, BLOCK)
    number = tl.program_id(0) // COLUMNS
    column = (tl.program_id(0) % COLUMNS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = (values, order, stride // STEP * STEP)  # STEP divides it, so that neighbors are loaded together
    groups = tl.cdiv(num_segments, TOGETHER)
    piece = tl.cast(piece, tl.int64)
    if number >= groups:
        chunk = (number - groups + 1).to(tl.int64)
        _share(rows, segments, bounds, partial, chunk, num_rows, num_segments, piece, column, BLOCKS)
    elif TOGETHER == 1:
        _one_segment(rows, bounds, out, partial, number.to(tl.int64), piece, column, BLOCKS)
    else:
        first = number.to(tl.int64) * TOGETHER
        _several_segments(rows, bounds, out, partial, first, num_segments, piece, column, BLOCKS, TOGETHER)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "piece"])
def shares_kernel(
    segments, bounds, out, partial, num_rows, num_segments, piece,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the shares of segments that end after the chunk in which they begin; one program runs per
    chunk."""
    COLUMNS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    chunk = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = (tl.program_id(0) % COLUMNS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    chunks = tl.cdiv(num_rows, piece)
    behind = (chunk + 1) * piece
    segment = tl.load(segments + behind - 1, mask=behind < num_rows, other=-1).to(tl.int64)
    known = (segment >= 0) & (segment < num_segments)
    start = tl.load(bounds + segment, mask=known, other=-1)
    end = tl.load(bounds + segment + 1, mask=known, other=0)
    if (start >= chunk * piece) & (end > behind):
        last = (end - 1) // piece
        total = tl.zeros([BLOCK_M, BLOCK], tl.float32)
        for first in range(chunk + 1, last + 1, BLOCK_M):
            share = first + tl.arange(0, BLOCK_M)[:, None]
            pointer = partial + (chunks + share) * W + column
            total += tl.load(pointer, mask=(share <= last) & (column < W), other=0.0)
        first_rows = tl.load(partial + chunk * W + column, mask=column < W, other=0.0)
        tl.store(out + segment * W + column, first_rows + tl.sum(total, 0, keep_dims=True), mask=column < W)
