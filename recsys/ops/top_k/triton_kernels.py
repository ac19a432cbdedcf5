"""Top-k in three kernels: how far rounded scores can be off, the best one of each group, the answer.

The items are cut into groups. Rounded vectors are multiplied on the tensor cores, and of each group only the
largest score remains. The exact scores of a group are at most as far above it, and its best one at most as
far below it, as the roundings of vectors and sums can be. So all groups but a few are out of question, and
the scores of those few are computed again, from the vectors as they are.

Bounds, for a query q rounded to p and an item x rounded to y, of E numbers:

    |q x - p y| <= |q| |x - y| + |q - p| |y|                    (Cauchy and Schwarz)
    |p y - its sum| + |q x - its sum| <= E 2^-21 |q| |x|        (see `SUM_ERROR` of `triton_launch`)

What is not finite, or so large that sums may overflow, is out of bounds: such groups are always looked at.
"""

import triton
import triton.language as tl

# What a kernel reads of module scope must be a constexpr.
LAST_ITEM = tl.constexpr(2**32 - 1)
NO_KEY = tl.constexpr(-(2**63))
NOTHING = tl.constexpr(float("-inf"))
ANYTHING = tl.constexpr(float("inf"))
HUGE = tl.constexpr(2.0**100)
"""A bound is at least 2^-21 of the product of two lengths: below, no sum of products overflows."""

UPWARD = tl.constexpr(1 + 2.0**-12)
"""More than what rounding takes off a length or a bound."""

SMALLEST = tl.constexpr(2.0**-62)
"""Numbers below may have squares that are zero: so much for each may be missing in a length."""

TURNS = tl.constexpr(24)
"""Of a search for a number of 32 bits: the last 8 bits do not matter."""


@triton.jit
def _rising(score):
    """int32 in the order of float32 scores; both zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(score, item):
    """As `keys.keys_of`."""
    return (_rising(score).to(tl.int64) << 32) + (LAST_ITEM - item)


@triton.jit(do_not_specialize=["num_items"])
def measure_kernel(
    items, copy, widths, share, num_items, stride, stride_copy,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """widths [groups] float32: the bound for a query of length 1, the greatest of the group's items. With
    COPIED also copy [items, stride_copy], the rounded items, zero behind column D.

    share: what the roundings of queries and of sums come to, relative to an item's length.
    """
    group = tl.program_id(0)
    row = group * GROUP + tl.arange(0, GROUP)
    inside = (row < num_items)[:, None]
    start = row.to(tl.int64)[:, None]
    squares = tl.zeros([GROUP], tl.float32)
    squares_of_rest = tl.zeros([GROUP], tl.float32)
    for first in tl.static_range(0, BLOCK_D, STEP):
        column = first + tl.arange(0, STEP)[None, :]
        x = tl.load(items + start * stride + column, mask=inside & (column < D), other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        if COPIED:
            rounded = x.to(copy.dtype.element_ty)
            tl.store(copy + start * stride_copy + column, rounded, mask=inside & (column < stride_copy))
            rest = x - rounded.to(tl.float32)
            squares_of_rest += tl.sum(rest * rest, 1)
    missing = D * SMALLEST
    of_share = tl.load(share)
    width = of_share * (tl.sqrt(squares) + missing)
    if COPIED:
        width += (1.0 + of_share) * (tl.sqrt(squares_of_rest) + missing)
    width = tl.where(width < ANYTHING, width * UPWARD, ANYTHING)  # also where it is NaN
    tl.store(widths + group, tl.max(tl.where(row < num_items, width, 0.0), 0))


@triton.jit(do_not_specialize=["num_queries", "num_groups", "groups_per_part"])
def coarse_kernel(
    query_rows, item_rows, maxima, num_queries, num_groups, groups_per_part, stride_maxima,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """maxima [queries, stride_maxima] float32, the largest rounded score of each group. Rows behind the last
    item count as items of zeros.

    A program for each BLOCK_M queries and each part of the groups; queries fastest, so that programs at work
    share items.
    """
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    part = tl.program_id(0) // num_tiles
    first = (tl.program_id(0) % num_tiles) * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    q = query_rows.load([first, 0])
    out = maxima + query.to(tl.int64) * stride_maxima
    start = part * groups_per_part
    for group in range(start, tl.minimum(start + groups_per_part, num_groups)):
        score = tl.dot(q, item_rows.load([group * GROUP, 0]).T)
        tl.store(out + group, tl.max(score, 1), mask=query < num_queries)


@triton.jit
def _bounds(maxima, widths, group, num_groups, scale, reach, slack):
    """float32, for each group: a bound below its best score, one above."""
    inside = group < num_groups
    score = tl.load(maxima + group, mask=inside, other=NOTHING) * scale
    error = tl.load(widths + group, mask=inside, other=0.0) * reach + slack
    known = (error < HUGE) & (score == score)  # and not NaN
    return tl.where(known, score - error, NOTHING), tl.where(known, score + error, ANYTHING)


@triton.jit
def _threshold(
    maxima, widths, whole_groups, scale, reach, slack, wanted,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """A score that is not above that of the wanted-th best item, -inf if there may be none.

    Groups are dealt out to classes: so many classes have an item with that score or better.
    """
    lower = tl.full([CLASSES], NOTHING, tl.float32)
    for start in range(0, whole_groups, CLASSES):
        group = start + tl.arange(0, CLASSES)
        below = _bounds(maxima, widths, group, whole_groups, scale, reach, slack)[0]
        lower = tl.maximum(lower, below)
    number = _rising(lower).to(tl.int64)
    low = tl.min(number, 0)
    high = tl.max(number, 0) + 1
    for _turn in range(TURNS):
        middle = (low + high) >> 1
        enough = tl.sum((number >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    bits = low.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(wanted <= CLASSES, bits.to(tl.float32, bitcast=True), NOTHING)


@triton.jit
def _keys_of_group(
    query, items, group, first, num_items, stride, removed, removed_start, removed_end,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, REMOVED: tl.constexpr,
):  # fmt: skip
    """int64 [GROUP], exact; `NO_KEY` for what cannot be found."""
    row = group * GROUP + tl.arange(0, GROUP).to(tl.int64)
    inside = row < num_items
    score = tl.zeros([GROUP], tl.float32)
    for start in tl.static_range(0, BLOCK_D, STEP):
        column = start + tl.arange(0, STEP)
        mask = inside[:, None] & (column < D)[None, :]
        x = tl.load(items + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.load(query + column, mask=column < D, other=0.0)
        score += tl.sum(x * q[None, :], 1)
    item = first + row
    found = inside & (score > NOTHING)
    for start in range(removed_start, removed_end, REMOVED):
        place = start + tl.arange(0, REMOVED)
        gone = tl.load(removed + place, mask=place < removed_end, other=-1)
        found = found & (tl.max((gone[:, None] == item[None, :]).to(tl.int32), 0) == 0)
    return tl.where(found, _key(score, item), NO_KEY)


@triton.jit
def _worst(best, k, K: tl.constexpr):
    """The k-th best key."""
    return tl.min(tl.where(tl.arange(0, K) < k, best, 2**63 - 1), 0)


@triton.jit(do_not_specialize=["first", "num_items", "num_groups", "k"])
def choose_kernel(
    maxima, widths, queries, facts, items, removed, removed_offsets, best,
    first, num_items, num_groups, k, stride_maxima, stride_queries, stride_items,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, CLASSES: tl.constexpr, REMOVED: tl.constexpr,
):  # fmt: skip
    """best [queries, K] int64, keys of the k best so far in any order, with the items from `first` on.

    facts [queries, 3] float32: by what to multiply rounded scores; by what to multiply widths, and what to
    add, for a bound. removed [R] int64, removed_offsets [queries + 1] int64. A program for each query.
    """
    one = tl.program_id(0).to(tl.int64)
    maxima += one * stride_maxima
    queries += one * stride_queries
    scale = tl.load(facts + 3 * one)
    reach = tl.load(facts + 3 * one + 1)
    slack = tl.load(facts + 3 * one + 2)
    removed_start = tl.load(removed_offsets + one)
    removed_end = tl.load(removed_offsets + one + 1)
    wanted = tl.full([], 0, tl.int32) + k
    for start in range(removed_start, removed_end, REMOVED):
        place = start + tl.arange(0, REMOVED)
        gone = tl.load(removed + place, mask=place < removed_end, other=-1)
        wanted += tl.sum(((gone >= first) & (gone < first + num_items)).to(tl.int32), 0)
    whole_groups = num_items // GROUP
    least = _threshold(maxima, widths, whole_groups, scale, reach, slack, wanted, CLASSES)
    slot = tl.arange(0, K)
    kept = tl.load(best + one * K + slot)
    worst = _worst(kept, k, K)
    floor = tl.maximum(worst, _key(least, tl.full([], LAST_ITEM, tl.int64)) - 1)
    for start in range(0, num_groups, CLASSES):
        group = start + tl.arange(0, CLASSES)
        above = _bounds(maxima, widths, group, num_groups, scale, reach, slack)[1]
        above = tl.where(group < whole_groups, above, ANYTHING)
        item = first + group.to(tl.int64) * GROUP
        bounds = tl.where(group < num_groups, _key(above, item), NO_KEY)
        top = tl.max(bounds, 0)
        while top > floor:
            chosen = (LAST_ITEM - (top & LAST_ITEM) - first) // GROUP
            keys = _keys_of_group(
                queries, items, chosen, first, num_items, stride_items, removed, removed_start, removed_end,
                D, BLOCK_D, STEP, GROUP, REMOVED,
            )  # fmt: skip
            better = tl.max(keys, 0)
            while better > worst:
                kept = tl.where(kept == worst, better, kept)
                keys = tl.where(keys == better, NO_KEY, keys)
                worst = _worst(kept, k, K)
                better = tl.max(keys, 0)
            floor = tl.maximum(floor, worst)
            bounds = tl.where(bounds == top, NO_KEY, bounds)
            top = tl.max(bounds, 0)
    tl.store(best + one * K + slot, kept)
