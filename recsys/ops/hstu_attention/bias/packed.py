"""Kernels around the inline assembly of `ptx`: they write its tables, call it, and finish its sums.

The docstring of `ptx` explains records, near buckets, look-up tables and offsets.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.bias import ptx
from recsys.ops.hstu_attention.bias.kernels import EXACT, time_bucket
from recsys.ops.hstu_attention.work_list.item import (
    load_tile,
)

MOST_EDGES = tl.constexpr(ptx.MOST_EDGES)
MANY = tl.constexpr(ptx.MANY)
NEAR = tl.constexpr(ptx.NEAR)
BLOCK_TOKENS = tl.constexpr(ptx.BLOCK_TOKENS)
SCORES = tl.constexpr(ptx.SCORES)
THREADS = tl.constexpr(32 * ptx.WARPS)
RECORD_BYTES = tl.constexpr(ptx.RECORD_BYTES)
NEAR_BLOCKS = tl.constexpr(ptx.NEAR_BLOCKS)
NEAR_BYTES = tl.constexpr(ptx.NEAR_BYTES)


@triton.jit(
    do_not_specialize=["num_positions", "reach", "num_words", "position_stride", "time_stride", "parts"]
)
def tables_kernel(
    position_table, time_table, numbers, values, others, distances, lookup,
    num_positions, reach, num_words, position_stride, time_stride, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write both tables of a head as the inline assembly reads them, halved; `parts` programs per head.

    numbers, values, others: int32 [num_words], see `launch.record_numbers`.
    distances: float32 [H, 2 * reach + 1], the position table from distance `-reach` on, its ends repeated.
    lookup: int32 [H, num_words].
    """
    head = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    size = 2 * reach + 1
    place = tl.minimum(tl.maximum(at - reach, 0), num_positions - 1)
    entry = 0.5 * tl.load(position_table + head * position_stride + place).to(tl.float32)
    tl.store(distances + head * size + at, entry, mask=at < size)
    is_word = at < num_words
    value = tl.load(values + at, mask=is_word, other=-1)
    other = tl.load(others + at, mask=is_word, other=-1)
    row = time_table + head * time_stride
    entry = 0.5 * tl.load(row + value, mask=value >= 0, other=0.0).to(tl.float32)
    entry -= 0.5 * tl.load(row + other, mask=other >= 0, other=0.0).to(tl.float32)
    number = tl.load(numbers + at, mask=is_word, other=0)
    word = tl.where(value >= 0, entry.to(tl.int32, bitcast=True), number)
    tl.store(lookup + head * num_words + at, word, mask=is_word)


@triton.jit
def _columns(sums, at, inside, heads, head_stride, copy_stride, COPIES: tl.constexpr):
    """Sum entries `at` of `sums` over all copies, which are loaded at once, and over `heads` heads."""
    copy = tl.arange(0, COPIES)[:, None]
    total = tl.zeros([at.shape[0]], tl.float32)
    for head in range(heads):
        pointer = sums + head * head_stride + copy * copy_stride + at[None, :]
        total += tl.sum(tl.load(pointer, mask=inside[None, :], other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["num_positions", "num_buckets", "reach", "num_heads", "parts"])
def finish_kernel(
    position_sums, time_sums, position_grad, time_grad,
    num_positions, num_buckets, reach, num_heads, parts, scale,
    SHARED_POSITIONS: tl.constexpr, SHARED_TIMES: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the tables of one head or, if SHARED, of all heads; `parts` programs per head.

    position_sums: [COPIES, num_heads, 2 * reach + 1], from distance `-reach` on; sums for distances outside
        the table are added to its first and last entries. time_sums: [COPIES, num_heads, num_buckets].
    """
    head = (tl.program_id(0) // parts).to(tl.int64)
    own = tl.program_id(0) % parts
    at = own * BLOCK + tl.arange(0, BLOCK)
    size = (2 * reach + 1).to(tl.int64)
    step = num_heads * size  # elements from one copy to the next
    heads = tl.where(SHARED_POSITIONS, num_heads, 1)
    if head * heads < num_heads:
        sums = position_sums + head * size
        inside = (at < num_positions) & (at <= reach)
        total = _columns(sums + reach, at, inside, heads, size, step, COPIES)
        if own == 0:
            for first in range(0, reach, 4 * BLOCK):
                place = first + tl.arange(0, 4 * BLOCK)
                ends = _columns(sums, place, place < reach, heads, size, step, COPIES)
                total += tl.where(at == 0, tl.sum(ends, 0), 0.0)
        if own == (num_positions - 1) // BLOCK:
            for first in range(reach + num_positions, 2 * reach + 1, 4 * BLOCK):
                place = first + tl.arange(0, 4 * BLOCK)
                ends = _columns(sums, place, place < size, heads, size, step, COPIES)
                total += tl.where(at == num_positions - 1, tl.sum(ends, 0), 0.0)
        tl.store(position_grad + head * num_positions + at, total * scale, mask=at < num_positions)
    heads = tl.where(SHARED_TIMES, num_heads, 1)
    if (own * BLOCK < num_buckets) & (head * heads < num_heads):
        of_time = _columns(
            time_sums + head * num_buckets, at, at < num_buckets,
            heads, num_buckets, num_heads * num_buckets, COPIES,
        )  # fmt: skip
        tl.store(time_grad + head * num_buckets + at, of_time * scale, mask=at < num_buckets)


@triton.jit
def _write_near(
    times, buckets, start, first, length, time_edges, num_buckets,
    ROWS_FIRST: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Write the buckets of one block of scores, DISTANCE blocks from the diagonal."""
    timestamps, next_timestamps = times
    one = first + tl.arange(0, BLOCK_TOKENS)[:, None]
    place = tl.arange(0, BLOCK_TOKENS)[None, :]
    within = place % (BLOCK_TOKENS // 4)
    other = within // 2 * 8 + place // (BLOCK_TOKENS // 4) * 2 + within % 2
    shift = DISTANCE * BLOCK_TOKENS
    other = first + other + tl.where(ROWS_FIRST, -shift, shift)
    last = length - 1
    row = tl.where(ROWS_FIRST, one, other)
    key = tl.where(ROWS_FIRST, other, one)
    row = start + tl.minimum(tl.maximum(row, 0), last)
    key = start + tl.minimum(tl.maximum(key, 0), last)
    inside = one < length  # an item that is not used has length 0, and its clamped places lie outside
    seconds = tl.load(next_timestamps + row, mask=inside, other=0)
    seconds -= tl.load(timestamps + key, mask=inside, other=0)
    bucket = time_bucket(seconds, time_edges, num_buckets)
    pointer = buckets + (start + one) * NEAR_BYTES + DISTANCE * BLOCK_TOKENS + place
    tl.store(pointer, bucket.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["total_len", "num_buckets"])
def near_buckets_kernel(
    timestamps, next_timestamps, of_rows, of_keys, time_edges, items, total_len, num_buckets,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the time buckets of scores near the diagonal; one program per tile of BLOCK_TOKENS tokens.

    of_rows: uint8 [T + BLOCK_TOKENS, NEAR_BYTES], the buckets of each row's scores with the keys of its own
        tile and of the tiles before it, in the order in which `ptx` loads them. Zeros past the end.
    of_keys: the same shape, the buckets of each key's scores with the rows of its own tile and of the tiles
        behind it.
    """
    start, length, _, first = load_tile(items + tl.program_id(0).to(tl.int64) * COLUMNS)
    times = timestamps, next_timestamps
    for distance in tl.static_range(NEAR_BLOCKS):
        _write_near(times, of_rows, start, first, length, time_edges, num_buckets, True, distance)
        _write_near(times, of_keys, start, first, length, time_edges, num_buckets, False, distance)
    if tl.program_id(0) == 0:
        zeros = tl.zeros([BLOCK_TOKENS, BLOCK_TOKENS], tl.uint8)
        end = (total_len + tl.arange(0, BLOCK_TOKENS)[:, None]).to(tl.int64) * NEAR_BYTES
        end += tl.arange(0, BLOCK_TOKENS)[None, :]
        for distance in tl.static_range(NEAR_BLOCKS):
            tl.store(of_rows + end + distance * BLOCK_TOKENS, zeros)
            tl.store(of_keys + end + distance * BLOCK_TOKENS, zeros)


@triton.jit(do_not_specialize=["num_blocks", "num_buckets"])
def records_kernel(
    own_bounds, other_bounds, time_edges, items, records, num_blocks, num_buckets,
    COLUMNS: tl.constexpr, ROWS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a record for each block of a tile's scores; one program per item.

    own_bounds, other_bounds: the bounds of rows and of keys if ROWS_FIRST, otherwise of keys and of rows.
    records: int32 [1 + items * num_blocks, 4]; the first record only holds `num_blocks`.
    """
    number = tl.program_id(0).to(tl.int64)
    start, length, _, first = load_tile(items + number * COLUMNS)
    own_low = tl.load(own_bounds + (start + first) * 2)
    own_high = tl.load(own_bounds + (start + first) * 2 + 1)
    if number == 0:
        tl.store(records, num_blocks)
    for begin in range(0, num_blocks, BLOCK):
        block = begin + tl.arange(0, BLOCK)
        inside = (block < num_blocks) & (block * BLOCK_TOKENS < length)
        pointer = other_bounds + (start + block * BLOCK_TOKENS) * 2
        low = tl.load(pointer, mask=inside, other=0)
        high = tl.load(pointer + 1, mask=inside, other=0)
        if ROWS_FIRST:
            least, most, ahead = own_low - high, own_high - low, first - block * BLOCK_TOKENS
        else:
            least, most, ahead = low - own_high, high - own_low, block * BLOCK_TOKENS - first
        exact = (least >= 0) & (most - least < EXACT)
        lowest = time_bucket(tl.maximum(least, 0), time_edges, num_buckets)
        count = time_bucket(tl.maximum(most, 0), time_edges, num_buckets) - lowest
        kind = tl.where(exact & (count <= MOST_EDGES), count, MANY)
        # Two edges cost as much as reading stored buckets.
        kind = tl.where((ahead >= 0) & (ahead < NEAR_BYTES) & (kind > 1), NEAR, kind)
        pointer = records + (1 + number * num_blocks + block) * 4
        tl.store(pointer, lowest + kind * 256, mask=inside)
        for edge in tl.static_range(1, 4):
            seconds = tl.load(time_edges + tl.minimum(lowest + edge, num_buckets)) - least
            past = (1 - seconds).to(tl.float32)
            tl.store(pointer + edge, past.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def records_of(records, number):
    """Return a pointer to the records of an item."""
    return records + 4 + number * tl.load(records) * 4


@triton.jit
def packed_scores(
    product, alpha, one, first_one, other, first_other, sample, tables,
    TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Turn a product into half of the scores, [tokens of `one`, tokens of `other`], by `ptx.add_bias`.

    one, other: length of the sample, times and offsets of the tokens of the first and of the second
        dimension; then the near buckets (for `one`) and the first token (for `other`).
    sample: first target, size of a target group. tables: `distances`, `lookup`, the item's records.
    """
    return tl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        _arguments(product, alpha, one, first_one, other, first_other, sample, tables),
        dtype=tl.float32,
        is_pure=True,
        pack=SCORES,
    )


@triton.jit
def add_to_tables(
    grad_score, one, first_one, other, first_other, sample, tables, sums,
    TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block's scores [keys, rows] to `sums`, by `ptx.add_to_tables`.

    sums: a pointer to the sum for distance 0. The sums by time bucket stay in the program's shared memory
        between `begin` and `finish_sums`. The other parameters are those of `packed_scores`.
    """
    tl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        _arguments(grad_score, 0.0, one, first_one, other, first_other, sample, tables)
        + (sums.to(tl.int64),),
        dtype=tl.int32,
        is_pure=False,
        pack=SCORES,
    )


@triton.jit
def begin(lookup, TEXT: tl.constexpr):
    """Run `ptx.begin`, which must precede every other piece of the assembly."""
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(
        TEXT, "=r,r,l", [thread, lookup.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def finish_sums(sums, num_buckets, TEXT: tl.constexpr):
    """Add the program's sums by bucket to `sums`, by `ptx.finish_sums`."""
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(
        TEXT, "=r,r,l,r", [thread, sums.to(tl.int64), num_buckets], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _arguments(values, alpha, one, first_one, other, first_other, sample, tables):
    """Return the operands that both pieces of assembly share."""
    return (
        values,
        alpha,
        tables[0].to(tl.int64),
        first_one,
        first_other,
        one[0],
        other[0],
        sample[0],
        sample[1],
        one[1].to(tl.int64),
        other[1].to(tl.int64),
        one[2].to(tl.int64),
        other[2].to(tl.int64),
        tables[1].to(tl.int64),
        other[3].to(tl.int32),
        one[3].to(tl.int64),
        tables[2].to(tl.int64) + first_other.to(tl.uint32) // (BLOCK_TOKENS // RECORD_BYTES),
    )
