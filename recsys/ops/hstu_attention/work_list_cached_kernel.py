"""The items of `work_list.cached_work` from a kernel: tiles of new rows, each with the blocks of cached keys
and those of new keys that it sees.

The rules are those of `work_list_kernel`, whose parts it uses; tests compare every number. All in int64.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention import work_list
from recsys.ops.hstu_attention.work_list_kernel import MOST, _longer, _row_interval, _wider

# What a kernel reads of module scope must be a constexpr.
NUM_CACHED_COLUMNS = tl.constexpr(work_list.NUM_CACHED_COLUMNS)
COUNT_A = tl.constexpr(work_list.COUNT_A)
NEW = tl.constexpr(work_list.NEW)
CACHE_START = tl.constexpr(work_list.CACHE_START)


@triton.jit
def _part(start, end, low, high):
    """What of [start, end) lies in [low, high), counted from `low`; [0, 0) for nothing."""
    start = tl.minimum(tl.maximum(start, low), high) - low
    end = tl.minimum(tl.maximum(end, low), high) - low
    return tl.where(end > start, start, 0), tl.where(end > start, end, 0)


@triton.jit
def _store_runs(item, inside, some, hulls, free, low, high, BLOCK: tl.constexpr):
    """Columns `COUNT_A` to `UNMASKED_COUNT` of the blocks of tokens in [low, high), and how many blocks.

    `hulls`: what some row of the tile sees, in three intervals; `free`: what all rows see, in two.
    """
    start_a, end_a = _part(hulls[0], hulls[1], low, high)
    start_b, end_b = _part(hulls[2], hulls[3], low, high)
    start_c, end_c = _part(hulls[4], hulls[5], low, high)
    one_start, one_end = _part(free[0], free[1], low, high)
    two_start, two_end = _part(free[2], free[3], low, high)
    free_start, free_end = _longer(one_start, one_end, two_start, two_end)
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
    tl.store(item, count_a, mask=inside)
    tl.store(item + 1, first_b, mask=inside)
    tl.store(item + 2, count_b, mask=inside)
    tl.store(item + 3, first_c, mask=inside)
    tl.store(item + 4, count_c, mask=inside)
    tl.store(item + 5, masked, mask=inside)
    tl.store(item + 6, full, mask=inside)
    tl.store(item + 7, full_count, mask=inside)
    return count_a + count_b + count_c


@triton.jit(
    do_not_specialize=[
        "num_items",
        "batch_size",
        "contextual",
        "window",
        "prefix",
        "group_size",
        "parts",
    ]  # fmt: skip
)
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
    sample, before = number * 0, number * 0  # tiles of the samples before
    passed = tl.sum(number * 0)
    for block in range(0, batch_size, SAMPLES):
        one = block + tl.arange(0, SAMPLES)
        some = tl.load(lengths + one, mask=one < batch_size, other=0)
        ends = passed + tl.cumsum((some + TILE - 1) // TILE, 0)
        is_before = (ends[None, :] <= tile[:, None]) & (one < batch_size)[None, :]
        sample += tl.sum(is_before.to(tl.int64), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        passed += tl.sum((some + TILE - 1) // TILE)
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    kept = tl.load(cache_lengths + sample, mask=is_real, other=0)
    cache_start = tl.load(cache_offsets + sample, mask=is_real, other=0)
    ahead = length - tl.load(num_targets + sample, mask=is_real, other=0)  # new history, in front of targets
    history_end = ahead + kept
    first = tl.where(is_real, (tile - before) * TILE, 0)
    last = tl.minimum(first + TILE, length) - 1

    low_a, low_b, low_c = number * 0 + MOST, number * 0 + MOST, number * 0 + MOST
    high_a, high_b, high_c = number * 0, number * 0, number * 0
    all_a, all_b = number * 0 + MOST, number * 0 + MOST  # the first of the ends
    from_b = number * 0 - MOST  # the last of the starts
    for edge in tl.static_range(8):
        if edge == 0:
            position = first
        elif edge == 1:
            position = last
        elif edge < 4:
            position = contextual + (edge - 3) - kept
        elif edge < 6:
            position = contextual + prefix + (edge - 5) - kept
        else:
            position = ahead + (edge - 7)
        position = tl.maximum(tl.minimum(position, last), first) + kept
        a, b, c, d, e = _row_interval(
            position, history_end, contextual, window, prefix, group_size,
            WINDOWED, TARGET_WINDOW, CONTEXTUAL_READS,
        )  # fmt: skip
        low_a, high_a = _wider(low_a, high_a, a * 0, a)
        low_b, high_b = _wider(low_b, high_b, b, c)
        low_c, high_c = _wider(low_c, high_c, d, e)
        all_a, all_b = tl.minimum(all_a, a), tl.minimum(all_b, c)
        from_b = tl.maximum(from_b, b)
    low_a = tl.where(high_a > 0, low_a, 0)
    low_b = tl.where(high_b > 0, low_b, 0)
    low_c = tl.where(high_c > 0, low_c, 0)

    share = (kept + parts * BLOCK - 1) // (parts * BLOCK) * BLOCK
    part_first = tl.minimum(part * share, kept)
    part_end = tl.minimum((part + 1) * share, kept)
    whole = tl.where(part == parts - 1, kept + length, kept)
    item = items + number * NUM_CACHED_COLUMNS
    tl.store(item, start, mask=inside)
    tl.store(item + 1, length, mask=inside)
    tl.store(item + 2, history_end, mask=inside)
    tl.store(item + 3, first, mask=inside)
    hulls, free = (low_a, high_a, low_b, high_b, low_c, high_c), (all_a * 0, all_a, from_b, all_b)
    some = length > 0
    work = _store_runs(item + COUNT_A, inside, some, hulls, free, part_first, part_end, BLOCK)
    work += _store_runs(item + COUNT_A + NEW, inside, some, hulls, free, kept, whole, BLOCK)
    last_columns = item + CACHE_START
    tl.store(last_columns, cache_start, mask=inside)
    tl.store(last_columns + 1, kept, mask=inside)
    tl.store(last_columns + 2, part, mask=inside)
    tl.store(last_columns + 3, part_first, mask=inside)
    tl.store(last_columns + 4, part_end - part_first, mask=inside)
    tl.store(order_by + number, work, mask=inside)
