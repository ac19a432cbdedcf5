"""The items of `reference.cached_work` from a kernel: tiles of new rows, each with the blocks of cached keys
and those of new keys that it sees.

The rules are those of `work_list_kernel`, whose parts it uses; tests compare every number. All in int64.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.mask_forms import tile_intervals
from recsys.ops.hstu_attention.work_list import reference
from recsys.ops.hstu_attention.work_list.kernel import longer, sample_of, store

# What a kernel reads of module scope must be a constexpr.
NUM_CACHED_COLUMNS = tl.constexpr(reference.NUM_CACHED_COLUMNS)
COUNT_A = tl.constexpr(reference.COUNT_A)
NEW = tl.constexpr(reference.NEW)
CACHE_START = tl.constexpr(reference.CACHE_START)


@triton.jit
def _part(interval, low, high):
    """What of an interval lies in [low, high), counted from `low`; [0, 0) for nothing."""
    start = tl.minimum(tl.maximum(interval[0], low), high) - low
    end = tl.minimum(tl.maximum(interval[1], low), high) - low
    return tl.where(end > start, start, 0), tl.where(end > start, end, 0)


@triton.jit
def _store_runs(item, inside, some, hulls, free, low, high, BLOCK: tl.constexpr):
    """Columns `COUNT_A` to `UNMASKED_COUNT` of the blocks of tokens in [low, high), and how many blocks.

    `hulls`: what some row of the tile sees, in three intervals; `free`: what all rows see, in two.
    """
    start_a, end_a = _part(hulls[0], low, high)
    start_b, end_b = _part(hulls[1], low, high)
    start_c, end_c = _part(hulls[2], low, high)
    free_start, free_end = longer(_part(free[0], low, high), _part(free[1], low, high))
    end_a = tl.where(some, (end_a + BLOCK - 1) // BLOCK, 0)
    end_b = tl.where(some, (end_b + BLOCK - 1) // BLOCK, 0)
    end_c = tl.where(some, (end_c + BLOCK - 1) // BLOCK, 0)
    start_a, start_b, start_c = start_a // BLOCK, start_b // BLOCK, start_c // BLOCK
    # A run begins where those before it have ended.
    covered = tl.where(end_a > start_a, end_a, 0)
    first_b = tl.maximum(start_b, covered)
    first_c = tl.maximum(start_c, tl.maximum(covered, tl.where(end_b > start_b, end_b, 0)))
    count_a = tl.maximum(end_a - start_a, 0)
    count_b = tl.maximum(end_b - first_b, 0)
    count_c = tl.maximum(end_c - first_c, 0)
    full = (free_start + BLOCK - 1) // BLOCK
    full_count = tl.where(some, tl.maximum(free_end // BLOCK - full, 0), 0)
    masked = tl.minimum(tl.maximum(full - start_a, 0), count_a)
    masked += tl.minimum(tl.maximum(full - first_b, 0), count_b)
    masked += tl.minimum(tl.maximum(full - first_c, 0), count_c)
    columns = count_a, first_b, count_b, first_c, count_c, masked, full, full_count
    store(item, columns, inside)
    return count_a + count_b + count_c


@triton.jit(
    do_not_specialize=[
        "num_items", "batch_size", "contextual", "window", "prefix", "group_size", "parts",
    ],
)  # fmt: skip
def cached_items_kernel(
    offsets, lengths, num_targets, cache_offsets, cache_lengths, items, order_by,
    num_items, batch_size, contextual, window, prefix, group_size, parts,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    LANES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """items [num_items, NUM_CACHED_COLUMNS] and what to sort them by, the largest first; `parts` for each
    tile."""
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = number < num_items
    tile, part = number // parts, number % parts
    sample, before = sample_of(tile, lengths, num_targets, batch_size, 0, 0, TILE, TILE, False, SAMPLES)
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    kept = tl.load(cache_lengths + sample, mask=is_real, other=0)
    cache_start = tl.load(cache_offsets + sample, mask=is_real, other=0)
    ahead = length - tl.load(num_targets + sample, mask=is_real, other=0)  # new history, in front of targets
    history_end = ahead + kept
    first = tl.where(is_real, (tile - before) * TILE, 0)
    last = tl.minimum(first + TILE, length) - 1

    rule = (contextual, window, prefix, group_size)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, True, CONTEXTUAL_READS)
    hulls, free = tile_intervals(first, last, kept, history_end, length, rule, RULE, False)
    share = (kept + parts * BLOCK - 1) // (parts * BLOCK) * BLOCK
    part_first = tl.minimum(part * share, kept)
    part_end = tl.minimum((part + 1) * share, kept)
    whole = tl.where(part == parts - 1, kept + length, kept)
    item = items + number * NUM_CACHED_COLUMNS
    store(item, (start, length, history_end, first), inside)
    some = length > 0
    work = _store_runs(item + COUNT_A, inside, some, hulls, free, part_first, part_end, BLOCK)
    work += _store_runs(item + COUNT_A + NEW, inside, some, hulls, free, kept, whole, BLOCK)
    store(item + CACHE_START, (cache_start, kept, part, part_first, part_end - part_first), inside)
    tl.store(order_by + number, work, mask=inside)
