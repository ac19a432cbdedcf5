"""Kernels that move rows: one for rows of any number of bytes, one that adds up several copies of a row.

A program has whole rows, or some columns of them; each row of the output has one owner. STEP divides all
strides, so that the compiler moves neighbours together.
"""

import triton
import triton.language as tl


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
    """Write out [num_out, W], contiguous: row `index[n]` of all sources, zeros if they have no such row.

    Source s has rows `end_{s - 1}` to `end_s - 1`. Blocks of columns are fastest.
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
