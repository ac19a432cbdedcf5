"""The items of `work_list` from two kernels, one that makes them and one that puts them in order.

A program has some tiles, each is a number in its registers; an interval is a pair of such numbers.

The rules are those of `ops.jagged.mask.row_intervals` and `column_intervals`, at the same edges, and of
`work_list`; tests compare every number. All in int64.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.work_list import reference

# What a kernel reads of module scope must be a constexpr.
NUM_COLUMNS = tl.constexpr(reference.NUM_COLUMNS)
COUNT_A = tl.constexpr(reference.COUNT_A)
COUNT_B = tl.constexpr(reference.COUNT_B)
COUNT_C = tl.constexpr(reference.COUNT_C)
MOST = tl.constexpr(2**62)


@triton.jit
def rows_missing(lengths, TILE: tl.constexpr, STRIP: tl.constexpr):
    """How many rows before each sample its first tile begins: none where a strip is a tile."""
    strips = (lengths.to(tl.int32) + STRIP - 1) // STRIP
    return (TILE // STRIP - 1 - (strips + TILE // STRIP - 1) % (TILE // STRIP)) * STRIP


@triton.jit
def _left_out(oldest, missing, contextual, TILE: tl.constexpr):
    """The tiles [behind, end) of nothing but older history."""
    end = (tl.maximum(oldest, contextual) + missing) // TILE
    behind = tl.where(contextual > 0, (contextual + missing + TILE - 1) // TILE, 0)
    return tl.minimum(end, behind), end


@triton.jit
def sample_of(
    tile, lengths, num_targets, batch_size, contextual, tail,
    TILE: tl.constexpr, STRIP: tl.constexpr, TAIL: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """The sample of each tile, B for one that is none, and how many tiles the samples before it have.

    With `TAIL` those of nothing but history older than the newest `tail` tokens are not counted.
    """
    sample, before = tile * 0, tile * 0
    passed = tl.sum(tile * 0)
    for block in range(0, batch_size, SAMPLES):
        one = block + tl.arange(0, SAMPLES)
        some = tl.load(lengths + one, mask=one < batch_size, other=0)
        count = (some + TILE - 1) // TILE
        if TAIL:
            oldest = tl.maximum(some - tl.load(num_targets + one, mask=one < batch_size, other=0) - tail, 0)
            behind, end = _left_out(oldest, rows_missing(some, TILE, STRIP), contextual, TILE)
            count -= tl.where(one < batch_size, end - behind, 0)
        ends = passed + tl.cumsum(count, 0)
        is_before = (ends[None, :] <= tile[:, None]) & (one < batch_size)[None, :]
        sample += tl.sum(is_before.to(tl.int64), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        passed += tl.sum(count)
    return sample, before


@triton.jit
def row_interval(
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
def union(hull, start, end):
    """The hull of an interval and [start, end), which does not count when it is empty."""
    used = end > start
    low = tl.where(used, tl.minimum(hull[0], start), hull[0])
    return low, tl.where(used, tl.maximum(hull[1], end), hull[1])


@triton.jit
def settled(hulls):
    """Hulls that have had their last `union`, [0, 0) where all intervals were empty."""
    one, two, three = hulls
    return (
        (tl.where(one[1] > 0, one[0], 0), one[1]),
        (tl.where(two[1] > 0, two[0], 0), two[1]),
        (tl.where(three[1] > 0, three[0], 0), three[1]),
    )


@triton.jit
def longer(one, other):
    first = one[1] - one[0] >= other[1] - other[0]
    return tl.where(first, one[0], other[0]), tl.where(first, one[1], other[1])


@triton.jit
def store(item, columns, inside):
    for column in tl.static_range(len(columns)):
        tl.store(item + column, columns[column], mask=inside)


@triton.jit
def _visited(
    first, last, history_end, length, contextual, window, prefix, group_size,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
):  # fmt: skip
    """Of the tokens from `first` to `last` the hulls, not yet `settled`, of all intervals of `row_interval`
    (or `_key_interval`), and what these have in common."""
    zero = first * 0
    one, two, three = (zero + MOST, zero), (zero + MOST, zero), (zero + MOST, zero)
    end_a, end_b, end_c = zero + MOST, zero + MOST, zero + MOST
    start_b, start_c = zero - MOST, zero - MOST
    outside = history_end - window  # the first key of the last target's window
    for edge in tl.static_range(10 if KEYS else 8):
        if edge == 0:
            position = first
        elif edge == 1:
            position = last
        elif edge < 4:
            position = zero + contextual + (edge - 3)
        elif edge < 6:
            position = zero + contextual + prefix + (edge - 5)
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
            a, b, c, d, e = row_interval(
                position, history_end, contextual, window, prefix, group_size,
                WINDOWED, TARGET_WINDOW, CONTEXTUAL_READS,
            )  # fmt: skip
        one, two, three = union(one, zero, a), union(two, b, c), union(three, d, e)
        end_a, end_b, end_c = tl.minimum(end_a, a), tl.minimum(end_b, c), tl.minimum(end_c, e)
        start_b, start_c = tl.maximum(start_b, b), tl.maximum(start_c, d)
    return (one, two, three), ((zero, end_a), (start_b, end_b), (start_c, end_c))


@triton.jit
def _without_older(kinds, oldest):
    """Of history only the rows from `oldest` on; its last one stays where nothing else sees the tile: a
    program that visits no block would write nothing."""
    contextual, history, targets = kinds
    newer = tl.maximum(history[0], oldest)
    alone = (contextual[1] == 0) & (targets[1] == 0)
    newer = tl.where(alone, tl.maximum(tl.minimum(newer, history[1] - 1), 0), newer)
    return contextual, (newer, history[1]), targets


@triton.jit
def _unmasked_rows(history, targets, length, BLOCK: tl.constexpr):
    """The rows that see all keys of a tile."""
    # History rows that see all keys, and targets that do, follow one another when both reach the border.
    joined = (history[0] < history[1]) & (history[1] == targets[0]) & (targets[0] < targets[1])
    start, end = longer((history[0], tl.where(joined, targets[1], history[1])), targets)
    # Rows past the end of a sample are loaded as zeros: its last block may be a full one.
    return start, tl.where(end == length, end + BLOCK - 1, end)


@triton.jit
def _runs(some, hulls, free, BLOCK: tl.constexpr):
    """Columns `COUNT_A` to `UNMASKED_COUNT`; of tiles without `some` no blocks.

    `hulls`: what the tile visits, three intervals; `free`: what of it needs no mask.
    """
    end_a = tl.where(some, (hulls[0][1] + BLOCK - 1) // BLOCK, 0)
    end_b = tl.where(some, (hulls[1][1] + BLOCK - 1) // BLOCK, 0)
    end_c = tl.where(some, (hulls[2][1] + BLOCK - 1) // BLOCK, 0)
    start_a, start_b, start_c = hulls[0][0] // BLOCK, hulls[1][0] // BLOCK, hulls[2][0] // BLOCK
    # A run begins where those before it have ended.
    count_a = tl.maximum(end_a - start_a, 0)
    ended = tl.where(count_a > 0, end_a, 0)
    start_b = tl.maximum(start_b, ended)
    count_b = tl.maximum(end_b - start_b, 0)
    ended = tl.where(count_b > 0, end_b, ended)
    start_c = tl.maximum(start_c, ended)
    count_c = tl.maximum(end_c - start_c, 0)
    full = (free[0] + BLOCK - 1) // BLOCK
    full_count = tl.where(some, tl.maximum(free[1] // BLOCK - full, 0), 0)
    masked = tl.minimum(tl.maximum(full - start_a, 0), count_a)
    masked += tl.minimum(tl.maximum(full - start_b, 0), count_b)
    masked += tl.minimum(tl.maximum(full - start_c, 0), count_c)
    return count_a, start_b, count_b, start_c, count_c, masked, full, full_count


@triton.jit(
    do_not_specialize=[
        "num_tiles", "batch_size", "contextual", "window", "prefix", "group_size", "total_len", "tail",
    ],
)  # fmt: skip
def items_kernel(
    offsets, lengths, num_targets, sections, items, order_by,
    num_tiles, batch_size, contextual, window, prefix, group_size, total_len, tail,
    KEYS: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
    SECTIONED: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    TAIL: tl.constexpr, LANES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """items [num_tiles, NUM_COLUMNS] and what to sort them by, the largest first.

    `sections` [B], of the samples. Tiles past the last one of the last sample are none.
    """
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = number < num_tiles
    LEFT_OUT: tl.constexpr = TAIL and not KEYS  # of keys no tile is, but blocks that they would visit
    sample, before = sample_of(
        number, lengths, num_targets, batch_size, contextual, tail, TILE, STRIP, LEFT_OUT, SAMPLES
    )
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    history_end = length - tl.load(num_targets + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    place = number - before
    oldest = tl.maximum(history_end - tail, 0)  # of the history that counts, where not all of it does
    if LEFT_OUT:
        behind, end = _left_out(oldest, rows_missing(length, TILE, STRIP), contextual, TILE)
        place += tl.where(place >= behind, end - behind, 0)
    if STRIP < TILE:  # from the end on: with `place * TILE` instead, registers spill
        begin = tl.where(is_real, (place + 1) * TILE - rows_missing(length, TILE, STRIP), TILE) - TILE
    else:
        begin = tl.where(is_real, place * TILE, 0)
    last = tl.minimum(begin + TILE, length) - 1

    first = begin
    if STRIP < TILE:
        first = tl.maximum(begin, 0)
    hulls, common = _visited(
        first, last, history_end, length, contextual, window, prefix, group_size,
        KEYS, WINDOWED, TARGET_WINDOW, CONTEXTUAL_READS,
    )  # fmt: skip
    if KEYS:
        history, targets = common[1], common[2]
        if TAIL:
            oldest = oldest // BLOCK * BLOCK
            hulls = _without_older(settled(hulls), oldest)
            history = tl.maximum(history[0], oldest), history[1]
        free = _unmasked_rows(history, targets, length, BLOCK)
    else:
        free = longer(common[0], common[1])
    if not (KEYS and TAIL):
        hulls = settled(hulls)
    some = length > 0
    columns = (start, length, history_end, begin) + _runs(some, hulls, free, BLOCK)
    store(items + number * NUM_COLUMNS, columns, inside)
    work = columns[COUNT_A] + columns[COUNT_B] + columns[COUNT_C]
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
