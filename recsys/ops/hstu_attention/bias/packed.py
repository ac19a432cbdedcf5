"""Kernels around the inline assembly of `ptx`: they write its tables, call it, and finish its sums.

Their launches decide when kernels add the bias by the assembly, and prepare tables, records and sums. The
docstring of `ptx` explains records, near buckets, look-up tables and offsets.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.hstu_attention.bias import ptx
from recsys.ops.hstu_attention.bias.kernels import (
    EXACT,
    LARGEST_BLOCK,
    constant,
    kept,
    time_bucket,
    time_edges,
    times_of,
)
from recsys.ops.hstu_attention.block_sizes import can_pack
from recsys.ops.hstu_attention.work_list.kernels import load_tile
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.descriptors import Boxes
from recsys.ops.runtime.launch import launch, launch_specialized, unwrapped

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

    numbers, values, others: int32 [num_words], see `record_numbers`.
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


TABLE_BLOCK = 512
"""Table entries per program."""

PACKED_STEP = 2
"""Step of packed offsets (see `times_kernel`): samples begin at even indices, so that pairs load at once."""


def holds_edges(bias: RelativeBias) -> bool:
    """Return True if the inline assembly can hold all edges of the time buckets, which may span up to 34
    years."""
    return time_edges(int(bias.time_table.shape[-1]))[-2] <= ptx.MOST_SECONDS


class PackedTables(NamedTuple):
    """Tables of a bias in the form that `tables_kernel` writes."""

    distances: Tensor  # float32 [H or 1, 2 * reach + 1]
    lookup: Tensor  # int32 [H or 1, n]
    reach: int


def packed_tables(bias: RelativeBias, layout: SequenceLayout) -> PackedTables:
    """Prepare the tables for kernels with the inline assembly of `ptx`."""
    tables = [table.detach().contiguous() for table in (bias.position_table, bias.time_table)]
    num_positions, num_buckets = (int(table.shape[-1]) for table in tables)
    reach, device = layout.max_len + LARGEST_BLOCK, tables[0].device
    num_heads = max(table.shape[0] if table.dim() == 2 else 1 for table in tables)
    numbers = [constant(column, device, unwrapped) for column in record_columns(num_buckets)]
    num_distances, num_words = 2 * reach + 1, numbers[0].shape[0]
    distances = torch.empty(num_heads, num_distances, dtype=torch.float32, device=device)
    lookup = torch.empty(num_heads, num_words, dtype=torch.int32, device=device)
    strides = [int(table.shape[-1]) if table.dim() == 2 else 0 for table in tables]
    parts = -(-max(num_distances, num_words) // TABLE_BLOCK)
    launch(
        tables_kernel,
        parts * num_heads,
        (*tables, *numbers, distances, lookup),
        (num_positions, reach, num_words, *strides, parts),
        {"BLOCK": TABLE_BLOCK},
    )
    return PackedTables(distances, lookup, reach)


def packed_arguments(
    bias: RelativeBias,
    tables: PackedTables,
    layout: SequenceLayout,
    items: Tensor,
    order: tuple[AttentionMask, bool, int | None],
) -> list[Tensor | int]:
    """Return what `bias_arguments` returns, for kernels with the inline assembly; `holds_edges` must hold.

    Differences: `time_table` is the look-up table, `time_edges` the output of `near_buckets_kernel`, and
    `float_edges` the records, `max_len / 256` bytes per token. Offsets have step `PACKED_STEP`.

    Args:
        order: what the order of `items` depends on: the mask, whether they are tiles of rows, and the
            section.
    """
    rows_first = order[1]
    given, num_buckets = (bias.timestamps, bias.next_timestamps), int(bias.time_table.shape[-1])
    sizes = (ptx.BLOCK_TOKENS, ptx.BLOCK_TOKENS)
    times, behind, key_bounds, next_times, ahead, row_bounds = kept(
        layout,
        ("packed_bias_times",),
        given,
        lambda: times_of(*given, items, *sizes, unwrapped, step=PACKED_STEP),
    )
    near = kept(
        layout,
        ("near_buckets", num_buckets),
        given,
        lambda: _near_buckets(times, next_times, items, num_buckets),
    )
    (records,) = kept(
        layout,
        ("bias_records", *order, num_buckets),
        given,
        lambda: [_records(row_bounds, key_bounds, items, rows_first, layout.max_len, num_buckets)],
    )
    shared = tables.distances.shape[0] == 1
    return [
        tables.distances,
        tables.lookup,
        near[0 if rows_first else 1],
        records,
        times,
        behind,
        key_bounds,
        next_times,
        ahead,
        row_bounds,
        0 if shared else tables.distances.shape[1],
        0 if shared else tables.lookup.shape[1],
        tables.reach,
        num_buckets,
    ]


def _near_buckets(
    timestamps: Tensor, next_timestamps: Tensor, items: Tensor, num_buckets: int
) -> list[Tensor]:
    """Return the near buckets of rows and of keys, see `near_buckets_kernel`."""
    size = timestamps.shape[0] + ptx.BLOCK_TOKENS
    buckets = [timestamps.new_empty(size, ptx.NEAR_BYTES, dtype=torch.uint8) for _ in range(2)]
    edges = constant(time_edges(num_buckets), timestamps.device, unwrapped)
    near_buckets_kernel[(items.shape[0],)](
        timestamps, next_timestamps, *buckets, edges, items, timestamps.shape[0], num_buckets,
        COLUMNS=items.shape[1],
    )  # fmt: skip
    return buckets


def _records(
    row_bounds: Tensor, key_bounds: Tensor, items: Tensor, rows_first: bool, longest: int, num_buckets: int
) -> Tensor:
    """Return the records, 16 bytes for each block of scores; see `records_kernel`."""
    bounds, num_blocks = (row_bounds, key_bounds), -(-longest // ptx.BLOCK_TOKENS)
    records = items.new_empty(1 + items.shape[0] * num_blocks, 4, dtype=torch.int32)
    edges = constant(time_edges(num_buckets), items.device, unwrapped)
    records_kernel[(items.shape[0],)](
        *(bounds if rows_first else bounds[::-1]), edges, items, records, num_blocks, num_buckets,
        COLUMNS=items.shape[1], ROWS_FIRST=rows_first, BLOCK=32,
    )  # fmt: skip
    return records


def record_numbers(num_buckets: int) -> list[tuple[int, int, int]]:
    """Describe each word of the look-up table: (number, -1, -1), (-1, table entry, -1) or (-1, entry, entry
    to subtract)."""
    edges, last = time_edges(num_buckets), num_buckets - 1
    numbers = [(-1, min(bucket, last), -1) for bucket in range(ptx.MOST_BUCKETS)]
    for cell in range(ptx.NUM_CELLS):
        first, end = ((4 + n % 4) * 2 ** (n // 4) for n in (cell, cell + 1))  # in quarters of a second
        first, end = -(-first // 4), -(-end // 4)
        below, above = (
            min(bisect_right(edges, seconds) - 1, last) for seconds in (first, max(first, end - 1))
        )
        edge = edges[above] if above > below else -1
        numbers += [(edge, -1, -1), (-1, below, -1), (-1, above, -1), (below | above << 16, -1, -1)]
    for bucket in range(num_buckets):
        later = [min(bucket + n, last) for n in range(4)]
        numbers += [(-1, bucket, -1)] + [(-1, later[n], later[n - 1]) for n in range(1, 4)]
    return numbers


@lru_cache(maxsize=64)
def record_columns(num_buckets: int) -> tuple[tuple[int, ...], ...]:
    """Return `record_numbers` column by column."""
    number, value, less = zip(*record_numbers(num_buckets), strict=True)
    return number, value, less


DYNAMIC_SHARED_BYTES = ctypes.c_int(8)
"""The driver's attribute number CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

COPIES = 8
"""Copies of the sums that many programs add to, so that they seldom wait for one another. A power of two."""

FINISH_BLOCK = 256
"""Table entries that one program finishes."""


class Sums(NamedTuple):
    """Partial gradients of the bias tables, float32: twice the gradients, without the factor 1 /
    scale_len."""

    by_distance: Tensor  # [COPIES, H, 2 * reach + 1], from distance -reach on
    by_bucket: Tensor  # [COPIES, H, num_buckets]


def is_packed(kernel: str, q: Tensor, v: Tensor, bias: RelativeBias | None) -> bool:
    """Return True if this kernel uses the inline assembly: on Hopper, for the sizes and buckets that it
    supports."""
    if bias is None or not _is_hopper(q.device):
        return False
    has_sizes = can_pack(kernel, q.dtype, int(q.shape[2]), int(v.shape[2]))
    return has_sizes and holds_edges(bias)


@lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launch_with_declared_memory(
    kernel: Any,
    programs: int,
    arguments: Sequence[Boxes | Tensor | int | float],
    compiled_for: dict[str, Any],
    describe: Callable[[Boxes], Any],
) -> None:
    """Start `kernel[(programs,)](*arguments, **compiled_for)`, whose assembly declares shared memory.

    Triton does not know of that memory, and requests more than 48 KB only if its own memory needs more.
    """

    def again() -> None:
        launch_specialized(kernel, programs, arguments, compiled_for, describe)

    try:
        again()
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
        described = [
            describe(argument) if isinstance(argument, Boxes) else argument for argument in arguments
        ]
        compiled = kernel.warmup(*described, grid=(programs,), **compiled_for)
        of_function = (
            ctypes.c_void_p(compiled.function),
            DYNAMIC_SHARED_BYTES,
            ctypes.c_int(compiled.metadata.shared),
        )
        if ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(*of_function) != 0:
            raise
        again()


def zero_sums(q: Tensor, longest: int, bias: RelativeBias) -> Sums:
    """Return zero-initialized sums for samples of at most `longest` tokens."""
    sizes = 2 * (longest + LARGEST_BLOCK) + 1, int(bias.time_table.shape[-1])
    rows = COPIES * int(q.shape[1])
    both = q.new_zeros(rows * sum(sizes), dtype=torch.float32)
    by_distance, by_bucket = both.split([rows * size for size in sizes])
    return Sums(by_distance.view(COPIES, -1, sizes[0]), by_bucket.view(COPIES, -1, sizes[1]))


def finished(sums: Sums, scale_len: float, bias: RelativeBias) -> tuple[Tensor, Tensor]:
    """Return the gradients of both tables from their sums."""
    tables = bias.position_table, bias.time_table
    grads = [torch.empty(table.shape, dtype=table.dtype, device=table.device) for table in tables]
    sizes = [int(table.shape[-1]) for table in tables]
    shared = [table.dim() == 1 for table in tables]
    num_heads, block = sums.by_distance.shape[1], FINISH_BLOCK
    parts = -(-max(sizes) // block)
    numbers = *sizes, sums.by_distance.shape[2] // 2, num_heads, parts, 0.5 / scale_len
    compiled_for = {"SHARED_POSITIONS": shared[0], "SHARED_TIMES": shared[1]}
    compiled_for |= {"COPIES": COPIES, "BLOCK": block}
    launch(finish_kernel, parts * (1 if all(shared) else num_heads), (*sums, *grads), numbers, compiled_for)
    return grads[0], grads[1]


def bias_constants(packed: bool, rows_first: bool, sums: bool = False) -> dict[str, str]:
    """Return the assembly that adds the bias to blocks, [rows, keys] if `rows_first` or else [keys, rows],
    and the assembly to run before the first block; both are empty if not `packed`. sums: the kernel also has
    `tables_constants`."""
    if not packed:
        return dict.fromkeys(("BIAS_TEXT", "BIAS_CONSTRAINTS", "BEGIN_TEXT"), "")
    text, constraints = _add_bias(rows_first)
    return {"BIAS_TEXT": text, "BIAS_CONSTRAINTS": constraints, "BEGIN_TEXT": _begin(sums)}


def tables_constants(sums: Sums | None) -> dict[str, str]:
    """Return the assembly that adds blocks [keys, rows] to the sums, and the assembly to run after the last
    block; both are empty without sums."""
    if sums is None:
        return dict.fromkeys(("TABLES_TEXT", "TABLES_CONSTRAINTS", "FINISH_TEXT"), "")
    text, constraints = _add_to_tables()
    return {"TABLES_TEXT": text, "TABLES_CONSTRAINTS": constraints, "FINISH_TEXT": _finish_sums()}


_add_bias = lru_cache(maxsize=2)(ptx.add_bias)

_begin = lru_cache(maxsize=2)(ptx.begin)

_add_to_tables = lru_cache(maxsize=1)(ptx.add_to_tables)

_finish_sums = lru_cache(maxsize=1)(ptx.finish_sums)
