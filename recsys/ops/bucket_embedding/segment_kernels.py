"""Sums sorted rows by segment in float32, without atomics; a long segment occupies many programs.

The sorted rows are cut into chunks of `piece` rows, independently of the segments. One program sums a segment
up to the end of the chunk in which it begins. If the segment continues, a program per further chunk sums that
chunk's share, and the second kernel adds the shares in order. So the order of a sum depends only on the
segments.

    partial  float32 [2 * chunks, W]: for each chunk, the sum of the first rows of the segment that crosses
             its end; after these, for each chunk, the share of the segment that crosses its start
    bounds   int64 [num_segments + 1]: the first row of each segment, and the end
    segments [num_rows]: the segment of each row; rows outside [0, num_segments) are in no sum
    rows     values, order, and stride of the values; BLOCKS are W, BLOCK_M, BLOCK
"""

import triton
import triton.language as tl


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
