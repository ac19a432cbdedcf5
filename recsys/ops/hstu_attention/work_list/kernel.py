"""The items of `work_list` from two kernels, one that makes them and one that puts them in order.

A program has some tiles, each is a number in its registers; an interval is a pair of such numbers.

The rules are those of `ops.jagged.mask.row_intervals` and `column_intervals`, at the same edges, and of
`work_list`; tests compare every number. All in int64.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.mask_forms import tile_intervals
from recsys.ops.hstu_attention.work_list import reference

# What a kernel reads of module scope must be a constexpr.
NUM_COLUMNS = tl.constexpr(reference.NUM_COLUMNS)
COUNT_A = tl.constexpr(reference.COUNT_A)
COUNT_B = tl.constexpr(reference.COUNT_B)
COUNT_C = tl.constexpr(reference.COUNT_C)


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
def longer(one, other):
    first = one[1] - one[0] >= other[1] - other[0]
    return tl.where(first, one[0], other[0]), tl.where(first, one[1], other[1])


@triton.jit
def store(item, columns, inside):
    for column in tl.static_range(len(columns)):
        tl.store(item + column, columns[column], mask=inside)


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
    rule = (contextual, window, prefix, group_size)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, True, CONTEXTUAL_READS)
    hulls, common = tile_intervals(first, last, 0, history_end, length, rule, RULE, KEYS)
    if KEYS:
        history, targets = common[1], common[2]
        if TAIL:
            oldest = oldest // BLOCK * BLOCK
            hulls = _without_older(hulls, oldest)
            history = tl.maximum(history[0], oldest), history[1]
        free = _unmasked_rows(history, targets, length, BLOCK)
    else:
        free = longer(common[0], common[1])
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
