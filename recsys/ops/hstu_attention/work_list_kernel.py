"""The items of `work_list` from two kernels, one that makes them and one that puts them in order.

A program has some tiles, each is a number in its registers.

The rules are those of `recsys.ops.mask.row_intervals` and `column_intervals`, at the same edges, and of
`work_list`; tests compare every number. All in int64.
"""

import triton
import triton.language as tl

NUM_COLUMNS = tl.constexpr(12)
MOST = tl.constexpr(2**62)


@triton.jit
def _row_interval(
    position, history_end, contextual, window, prefix, group_size,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
):  # fmt: skip
    """The ends of what the row at `position` sees: [0, a), [b, c) and [d, e)."""
    is_target = position >= history_end
    row_end = tl.where(is_target, history_end, position + 1)
    first_end, middle_start, middle_end = row_end, row_end, row_end
    if WINDOWED:
        if TARGET_WINDOW:
            windowed = position == position
        else:
            windowed = position < history_end
        first_end = tl.where(windowed, tl.minimum(contextual + prefix, row_end), row_end)
        middle_start = tl.maximum(first_end, row_end - window)
        middle_end = tl.where(windowed, row_end, middle_start)
    if CONTEXTUAL_READS:
        contextual_end = history_end
    else:
        contextual_end = history_end * 0 + contextual
    is_contextual = position < contextual
    first_end = tl.where(is_contextual, contextual_end, first_end)
    middle_start = tl.where(is_contextual, contextual_end, middle_start)
    middle_end = tl.where(is_contextual, contextual_end, middle_end)
    place = tl.maximum(position - history_end, 0)
    last_start = tl.where(is_target, position - place % group_size, middle_end)
    last_end = tl.where(is_target, position + 1, middle_end)
    return first_end, middle_start, middle_end, last_start, last_end


@triton.jit
def _key_interval(
    position, history_end, length, contextual, window, prefix, group_size,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
):  # fmt: skip
    """The ends of the rows that see the key at `position`: [0, a), [b, c) and [d, e)."""
    is_target, always = position >= history_end, position < contextual + prefix
    if CONTEXTUAL_READS:
        sees_history = history_end
    else:
        sees_history = history_end * 0 + contextual
    contextual_end = tl.where(position < sees_history, contextual, 0).to(tl.int64)
    history_start = tl.where(is_target, history_end, tl.maximum(position, contextual))
    history_stop = history_end
    if WINDOWED:
        in_window = tl.minimum(position + window, history_end)
        history_stop = tl.where(always | is_target, history_end, in_window)
    own_group = position - tl.maximum(position - history_end, 0) % group_size
    target_start = tl.where(is_target, position, history_end)
    target_stop = tl.where(is_target, tl.minimum(own_group + group_size, length), length)
    if WINDOWED and TARGET_WINDOW:
        hidden = (position < history_end - window) & ~is_target & ~always
        target_stop = tl.where(hidden, target_start, target_stop)
    return contextual_end, history_start, history_stop, target_start, target_stop


@triton.jit
def _wider(low, high, start, end):
    """The hull of [low, high) and an interval, which does not count when it is empty."""
    used = end > start
    return tl.where(used, tl.minimum(low, start), low), tl.where(used, tl.maximum(high, end), high)


@triton.jit
def _longer(start, end, other_start, other_end):
    first = end - start >= other_end - other_start
    return tl.where(first, start, other_start), tl.where(first, end, other_end)


@triton.jit
def _left_out(oldest, contextual, TILE: tl.constexpr):
    """The tiles [behind, end) of nothing but older history."""
    end = tl.maximum(oldest, contextual) // TILE
    return tl.minimum(end, (contextual + TILE - 1) // TILE), end


@triton.jit(
    do_not_specialize=[
        "num_tiles",
        "batch_size",
        "contextual",
        "window",
        "prefix",
        "group_size",
        "total_len",
        "tail",
    ]  # fmt: skip
)
def items_kernel(
    offsets, lengths, num_targets, sections, items, order_by,
    num_tiles, batch_size, contextual, window, prefix, group_size, total_len, tail,
    KEYS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SECTIONED: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    TAIL: tl.constexpr, LANES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """items [num_tiles, NUM_COLUMNS] and what to sort them by, the largest first.

    `sections` [B], of the samples. Tiles past the last one of the last sample are none.
    """
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = number < num_tiles
    sample, before = number * 0, number * 0  # tiles of the samples before
    passed = tl.sum(number * 0)
    for block in range(0, batch_size, SAMPLES):
        one = block + tl.arange(0, SAMPLES)
        some = tl.load(lengths + one, mask=one < batch_size, other=0)
        count = (some + TILE - 1) // TILE
        if TAIL and not KEYS:
            oldest = tl.maximum(some - tl.load(num_targets + one, mask=one < batch_size, other=0) - tail, 0)
            behind, end = _left_out(oldest, contextual, TILE)
            count -= tl.where(one < batch_size, end - behind, 0)
        ends = passed + tl.cumsum(count, 0)
        is_before = (ends[None, :] <= number[:, None]) & (one < batch_size)[None, :]
        sample += tl.sum(is_before.to(tl.int64), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        passed += tl.sum(count)
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    history_end = length - tl.load(num_targets + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    place = number - before
    oldest = tl.maximum(history_end - tail, 0)  # of the history that counts, where not all of it does
    if TAIL and not KEYS:
        behind, end = _left_out(oldest, contextual, TILE)
        place += tl.where(place >= behind, end - behind, 0)
    first = tl.where(is_real, place * TILE, 0)
    last = tl.minimum(first + TILE, length) - 1

    low_a, low_b, low_c = number * 0 + MOST, number * 0 + MOST, number * 0 + MOST
    high_a, high_b, high_c = number * 0, number * 0, number * 0
    all_a, all_b, all_c = number * 0 + MOST, number * 0 + MOST, number * 0 + MOST  # the first of the ends
    from_b, from_c = number * 0 - MOST, number * 0 - MOST  # the last of the starts
    outside = history_end - window
    for edge in tl.static_range(10 if KEYS else 8):
        if edge == 0:
            position = first
        elif edge == 1:
            position = last
        elif edge < 4:
            position = first * 0 + contextual + (edge - 3)
        elif edge < 6:
            position = first * 0 + contextual + prefix + (edge - 5)
        elif edge < 8:
            position = history_end + (edge - 7)
        else:
            position = outside + (edge - 9)
        position = tl.maximum(tl.minimum(position, last), first)
        if KEYS:
            a, b, c, d, e = _key_interval(
                position, history_end, length, contextual, window, prefix, group_size,
                WINDOWED, TARGET_WINDOW, CONTEXTUAL_READS,
            )  # fmt: skip
        else:
            a, b, c, d, e = _row_interval(
                position, history_end, contextual, window, prefix, group_size,
                WINDOWED, TARGET_WINDOW, CONTEXTUAL_READS,
            )  # fmt: skip
        low_a, high_a = _wider(low_a, high_a, a * 0, a)
        low_b, high_b = _wider(low_b, high_b, b, c)
        low_c, high_c = _wider(low_c, high_c, d, e)
        all_a, all_b, all_c = tl.minimum(all_a, a), tl.minimum(all_b, c), tl.minimum(all_c, e)
        from_b, from_c = tl.maximum(from_b, b), tl.maximum(from_c, d)

    if KEYS and TAIL:
        oldest = oldest // BLOCK * BLOCK
        low_b = tl.where(high_b > 0, low_b, 0)
        newer = tl.maximum(low_b, oldest)
        alone = (high_a == 0) & (high_c == 0)  # and a program that visits no block would write nothing
        low_b = tl.where(alone, tl.maximum(tl.minimum(newer, high_b - 1), 0), newer)
        from_b = tl.maximum(from_b, oldest)
    if KEYS:
        joined = (from_b < all_b) & (all_b == from_c) & (from_c < all_c)
        free_start, free_end = _longer(from_b, tl.where(joined, all_c, all_b), from_c, all_c)
        # Rows past the end of a sample are loaded as zeros: its last block may be a full one.
        free_end = tl.where(free_end == length, free_end + BLOCK - 1, free_end)
    else:
        free_start, free_end = _longer(all_a * 0, all_a, from_b, all_b)
    low_a = tl.where(high_a > 0, low_a, 0)
    if not (KEYS and TAIL):
        low_b = tl.where(high_b > 0, low_b, 0)
    low_c = tl.where(high_c > 0, low_c, 0)

    some = length > 0
    end_a = tl.where(some, (high_a + BLOCK - 1) // BLOCK, 0)
    end_b = tl.where(some, (high_b + BLOCK - 1) // BLOCK, 0)
    end_c = tl.where(some, (high_c + BLOCK - 1) // BLOCK, 0)
    start_a, start_b, start_c = low_a // BLOCK, low_b // BLOCK, low_c // BLOCK
    count_a = tl.maximum(end_a - start_a, 0)
    covered = tl.where(count_a > 0, end_a, 0)
    start_b = tl.maximum(start_b, covered)
    count_b = tl.maximum(end_b - start_b, 0)
    covered = tl.where(count_b > 0, end_b, covered)
    start_c = tl.maximum(start_c, covered)
    count_c = tl.maximum(end_c - start_c, 0)
    full = (free_start + BLOCK - 1) // BLOCK
    full_count = tl.where(some, tl.maximum(free_end // BLOCK - full, 0), 0)
    masked = tl.minimum(tl.maximum(full - start_a, 0), count_a)
    masked += tl.minimum(tl.maximum(full - start_b, 0), count_b)
    masked += tl.minimum(tl.maximum(full - start_c, 0), count_c)

    item = items + number * NUM_COLUMNS
    tl.store(item, start, mask=inside)
    tl.store(item + 1, length, mask=inside)
    tl.store(item + 2, history_end, mask=inside)
    tl.store(item + 3, first, mask=inside)
    tl.store(item + 4, count_a, mask=inside)
    tl.store(item + 5, start_b, mask=inside)
    tl.store(item + 6, count_b, mask=inside)
    tl.store(item + 7, start_c, mask=inside)
    tl.store(item + 8, count_c, mask=inside)
    tl.store(item + 9, masked, mask=inside)
    tl.store(item + 10, full, mask=inside)
    tl.store(item + 11, full_count, mask=inside)
    work = count_a + count_b + count_c
    if SECTIONED:
        section = tl.load(sections + sample, mask=is_real, other=0)
        work = tl.where(some, (total_len - section) * (total_len // BLOCK + 2 * NUM_COLUMNS) + work, 0)
    tl.store(order_by + number, work, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def order_kernel(
    items, order_by, ordered, num_tiles,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """`ordered` = `items` [num_tiles, COLUMNS], the largest of `order_by` first, equals as they were: a
    tile's place is the number of those that come before it."""
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = number < num_tiles
    own = tl.load(order_by + number, mask=inside, other=0)[:, None]
    place = tl.zeros([LANES], tl.int32)
    for block in range(0, num_tiles, OTHERS):
        other = block + tl.arange(0, OTHERS)
        theirs = tl.load(order_by + other, mask=other < num_tiles, other=-1)[None, :]
        first = (theirs > own) | ((theirs == own) & (other[None, :] < number[:, None]))
        place += tl.sum(first.to(tl.int32), 1)
    column = tl.arange(0, PADDED)[None, :]
    used = inside[:, None] & (column < COLUMNS)
    item = tl.load(items + number[:, None] * COLUMNS + column, mask=used, other=0)
    tl.store(ordered + place[:, None] * COLUMNS + column, item, mask=used)
