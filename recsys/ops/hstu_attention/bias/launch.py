"""Prepare a relative bias for the Triton kernels: padded tables, bucket edges, times block by block."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.bias import ptx as ptx
from recsys.ops.hstu_attention.bias.kernels import PAST_THE_END, times_kernel
from recsys.ops.hstu_attention.bias.packed import (
    near_buckets_kernel,
    records_kernel,
    tables_kernel,
)
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import LOG_BUCKET, RelativeBias
from recsys.ops.runtime.launch import Wrap, launch, unwrapped

MAX_EDGE = 2**62
"""Exceeds every difference of two times, in seconds."""

LARGEST_BLOCK = PAST_THE_END.value
"""Number of tokens that a block may reach past the end of a sample."""

TABLE_BLOCK = 512
"""Table entries per program."""

PACKED_STEP = 2
"""Step of packed offsets (see `times_kernel`): samples begin at even indices, so that pairs load at once."""

NUM_ARGUMENTS = 14
"""Number of arguments that `bias_arguments` returns."""

RECORDS = 3
"""Index of the records among the arguments of `bias_arguments`."""

MOST_RECORD_BYTES = 32
"""Bytes of records per token. A batch that needs more, and more than `SMALL_RECORDS` in all, is cut into
parts that are launched one after the other with records of their own. Samples of 8,192 tokens reach this
limit."""

SMALL_RECORDS = 2**22
"""Bytes of records up to which a batch is never cut into parts."""


def bias_arguments(
    bias: RelativeBias | None,
    layout: SequenceLayout,
    longest: int,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Wrap,
    shared: bool = False,
) -> list[Tensor | int]:
    """Return the arguments `position_table` to `num_buckets`, in the order of the kernels' parameters.

    Both tables are in float32 and halved, as the scores are. The position table begins at distance `-reach`;
    its ends are repeated for all distances past them, so that no kernel has to clamp.

    Args:
        longest: upper bound on the tokens of a sample, including cached ones.
        items: tiles of `max(rows, keys)` tokens.
        rows, keys: tokens of a block of rows and of a block of keys, powers of two.
        shared: whether calls with the same layout and times share what is computed from the times; ignored
            in graphs.
    """
    if bias is None:
        return [items] * 10 + [0, 0, 0, 1]
    position, time = (0.5 * table.detach().float() for table in (bias.position_table, bias.time_table))
    num_positions, num_buckets = int(position.shape[-1]), int(time.shape[-1])
    reach = longest + LARGEST_BLOCK
    position = position.index_select(-1, _distances(layout, num_positions, reach, position.device))
    time = time.contiguous()
    edges = time_edges(num_buckets)  # a constant of the model, also in a traced graph
    exact = layout.memo(("time_edges", num_buckets), lambda: _constant(edges, time.device, wrap))
    rounded = layout.memo(("float_time_edges", num_buckets), exact.float)
    times = bias.timestamps, bias.next_timestamps

    def build() -> list[Tensor]:
        return _times(*times, items, rows, keys, wrap)

    return [
        position,
        time,
        exact,
        rounded,
        *(_kept(layout, ("bias_times", rows, keys), times, build) if shared else build()),
        position.stride(0) if position.dim() == 2 else 0,
        time.stride(0) if time.dim() == 2 else 0,
        reach,
        num_buckets,
    ]


def can_pack(bias: RelativeBias) -> bool:
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
    numbers = [_constant(column, device, unwrapped) for column in record_columns(num_buckets)]
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
    rows_first: bool,
) -> list[Tensor | int]:
    """Return what `bias_arguments` returns, for kernels with the inline assembly; `can_pack` must hold.

    Differences: `time_table` is the look-up table, `time_edges` the output of `near_buckets_kernel`, and
    `float_edges` a placeholder that `packed_parts` replaces by records. Offsets have step `PACKED_STEP`.

    Args:
        rows_first: whether items are tiles of rows.
    """
    given, num_buckets = (bias.timestamps, bias.next_timestamps), int(bias.time_table.shape[-1])
    sizes = (ptx.BLOCK_TOKENS, ptx.BLOCK_TOKENS)
    times, behind, key_bounds, next_times, ahead, row_bounds = _kept(
        layout,
        ("packed_bias_times",),
        given,
        lambda: _times(*given, items, *sizes, unwrapped, step=PACKED_STEP),
    )
    near = _kept(
        layout,
        ("near_buckets", num_buckets),
        given,
        lambda: _near_buckets(times, next_times, items, num_buckets),
    )
    shared = tables.distances.shape[0] == 1
    return [
        tables.distances,
        tables.lookup,
        near[0 if rows_first else 1],
        row_bounds,
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


def packed_parts(
    arguments: list[Tensor | int],
    times: tuple[Tensor, ...],
    layout: SequenceLayout,
    items: Tensor,
    order: tuple[AttentionMask, bool, int | None],
) -> Iterator[tuple[Tensor, list[Tensor | int]]]:
    """Yield all items and `arguments` with their records, or part after part to keep records in O(T) memory.

    The records of a part are valid until the next part is requested.

    Args:
        times: times of the bias.
        order: what the order of `items` depends on: the mask, whether they are tiles of rows, and the
            section.
    """
    rows_first, num_buckets = order[1], arguments[NUM_ARGUMENTS - 1]
    key_bounds, row_bounds = arguments[6], arguments[9]

    def records(part: Tensor) -> Tensor:
        return _records(row_bounds, key_bounds, part, rows_first, layout.max_len, num_buckets)

    parts = num_parts(items.shape[0], layout)
    if parts == 1:
        name = ("bias_records", *order, num_buckets)
        chosen = _kept(layout, name, times, lambda: [records(items)])
        yield items, [*arguments[:RECORDS], *chosen, *arguments[RECORDS + 1 :]]
        return
    for part in items.split(-(-items.shape[0] // parts)):
        yield part, [*arguments[:RECORDS], records(part), *arguments[RECORDS + 1 :]]


def num_parts(num_items: int, layout: SequenceLayout) -> int:
    """Return the number of parts into which `packed_parts` cuts the items."""
    allowed = max(MOST_RECORD_BYTES * layout.total_len, SMALL_RECORDS)
    return -(-num_items * -(-layout.max_len // ptx.BLOCK_TOKENS) * ptx.RECORD_BYTES // allowed)


def _near_buckets(
    timestamps: Tensor, next_timestamps: Tensor, items: Tensor, num_buckets: int
) -> list[Tensor]:
    """Return the near buckets of rows and of keys, see `near_buckets_kernel`."""
    size = timestamps.shape[0] + ptx.BLOCK_TOKENS
    buckets = [timestamps.new_empty(size, ptx.NEAR_BYTES, dtype=torch.uint8) for _ in range(2)]
    edges = _constant(time_edges(num_buckets), timestamps.device, unwrapped)
    near_buckets_kernel[(items.shape[0],)](
        timestamps, next_timestamps, *buckets, edges, items, timestamps.shape[0], num_buckets,
        COLUMNS=items.shape[1],
    )  # fmt: skip
    return buckets


def _records(
    row_bounds: Tensor,
    key_bounds: Tensor,
    items: Tensor,
    rows_first: bool,
    longest: int,
    num_buckets: int,
) -> Tensor:
    """Return the records, 16 bytes for each block of scores; see `records_kernel`."""
    bounds, num_blocks = (row_bounds, key_bounds), -(-longest // ptx.BLOCK_TOKENS)
    records = items.new_empty(1 + items.shape[0] * num_blocks, 4, dtype=torch.int32)
    edges = _constant(time_edges(num_buckets), items.device, unwrapped)
    records_kernel[(items.shape[0],)](
        *(bounds if rows_first else bounds[::-1]), edges, items, records, num_blocks, num_buckets,
        COLUMNS=items.shape[1], ROWS_FIRST=rows_first, BLOCK=32,
    )  # fmt: skip
    return records


def _kept(
    layout: SequenceLayout,
    name: tuple[Hashable, ...],
    times: tuple[Tensor, ...],
    build: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """Return `build()`, shared by the layers of a model as long as they pass the same times."""
    if any(t.is_inference() for t in times):  # inference tensors have no version
        return build()
    key = (*name, *((t.data_ptr(), t._version, t.stride(0)) for t in times))
    return layout.memo(key, lambda: (times, build()))[1]  # keeping `times` reserves their addresses


def _distances(layout: SequenceLayout, num_positions: int, reach: int, device: torch.device) -> Tensor:
    """Return int64 [2 * reach + 1]: the index in the position table for each distance from `-reach` on."""
    return layout.memo(
        ("distances", num_positions, reach),
        lambda: torch.arange(-reach, reach + 1, device=device).clamp(0, num_positions - 1),
    )


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


def cached_times(times: Tensor, items: Tensor, tile: int, keys: int, wrap: Wrap) -> list[Tensor]:
    """Return the times, offsets and bounds of cached tokens; `items` are tiles of `tile` cached tokens."""
    times = times.contiguous()
    offsets, bounds = _offsets_and_bounds(times)
    if times.shape[0] > 0:
        wrap(times_kernel)[(items.shape[0],)](
            times, times, offsets, bounds, offsets, bounds, items, times.shape[0],
            COLUMNS=items.shape[1], BLOCK=tile, ROWS=0, KEYS=keys, STEP=1,
        )  # fmt: skip
    return [times, offsets, bounds]


def _times(
    timestamps: Tensor,
    next_timestamps: Tensor,
    items: Tensor,
    rows: int,
    keys: int,
    wrap: Wrap,
    *,
    step: int = 1,
) -> list[Tensor]:
    """Return the arguments `timestamps` to `row_bounds` of the kernels."""
    timestamps, next_timestamps = timestamps.contiguous(), next_timestamps.contiguous()
    behind, ahead = (_offsets_and_bounds(times, step) for times in (timestamps, next_timestamps))
    wrap(times_kernel)[(items.shape[0],)](
        timestamps, next_timestamps, *behind, *ahead, items, timestamps.shape[0],
        COLUMNS=items.shape[1], BLOCK=max(rows, keys), ROWS=rows, KEYS=keys, STEP=step,
    )  # fmt: skip
    return [timestamps, *behind, next_timestamps, *ahead]


def _offsets_and_bounds(times: Tensor, step: int = 1) -> tuple[Tensor, Tensor]:
    size = times.shape[0]
    offsets = times.new_empty(step * size + LARGEST_BLOCK, dtype=torch.float32)
    return offsets, times.new_empty(size + LARGEST_BLOCK, 2)


def _constant(numbers: tuple[int, ...], device: torch.device, wrap: Wrap) -> Tensor:
    """Return int64 [n] on the device, in eager mode without waiting for the device. A traced graph gets a
    constant of its own: its tensors are fake, so they must neither be cached nor mix with real ones."""
    if device.type != "cuda" or wrap is not unwrapped:
        return torch.tensor(numbers, device=device)
    return _sent(numbers, device)


@lru_cache(maxsize=64)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    # The result is cached: a CUDA graph recorded later must not copy from host memory that is gone when the
    # graph runs.
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def time_edges(num_buckets: int) -> tuple[int, ...]:
    """Return the least difference in seconds of each time bucket, exactly, and a last edge that no difference
    reaches."""
    edges = [1]
    for bucket in range(1, num_buckets):
        low, high = max(edges[-1] - 1, 1), MAX_EDGE  # bucket(low) < bucket; the answer is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            reached = math.log(middle) / LOG_BUCKET >= bucket
            low, high = (low, middle) if reached else (middle, high)
        edges.append(high)
    return (*edges, 2**63 - 1)
