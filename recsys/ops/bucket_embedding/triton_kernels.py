"""The kernel of `bucket_embedding`: adds the vectors of buckets to tokens, in float32."""

import triton
import triton.language as tl


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
