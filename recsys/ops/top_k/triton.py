"""Computes exact top-k in four kernels: rounding, error bounds, the best rounded score of each group, the
answer.

The items are cut into groups. Tensor cores multiply rounded vectors, and only the largest score of each group
is stored. Bounds on the rounding errors of vectors and sums limit how far the group's best exact score can
lie above or below that score. This rules out nearly all groups; the scores of the others are computed again
from the original vectors.

The bounds, for a query q rounded to p and an item x rounded to y, with E entries each:

    |q x - p y| <= |q| |x - y| + |q - p| |y|                    (Cauchy and Schwarz)
    |p y - its sum| + |q x - its sum| <= E 2^-21 |q| |x|        (see `SUM_ERROR`)

Groups that are not finite, or so large that sums may overflow, have no bound and are always scored again.

The score of a group is stored as the bits of a float32 whose last bit is cleared; the change is within the
bounds. That bit is set for groups with a removed item, since the score may be that item's.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from recsys.ops.runtime.triton_support import block_width, num_processors
from recsys.ops.top_k import TopK, items_of, scores_of


class Blocks(NamedTuple):
    """Sizes of `coarse_kernel`."""

    queries: int  # queries per program
    group: int  # items per group, of which only the largest score is stored
    num_warps: int
    num_stages: int


BLOCKS = {
    64: Blocks(256, 128, 8, 3),
    128: Blocks(256, 128, 8, 3),
    256: Blocks(128, 64, 8, 3),
    512: Blocks(64, 64, 4, 2),
}
"""Sizes by padded width in columns."""

CHUNK_QUERIES = 4096
"""Queries processed at a time."""

CHUNK_BYTES = 512 * 2**20
"""Byte limit for the largest scores of a chunk's groups, and again for copies of the chunk's items (rounded,
and widened if they have 16 bits), whose rows are then few enough for 32 bits."""

PART = 64
"""Groups per program: many, so that queries are loaded rarely, but few enough for programs to end
together."""

CLASSES = 1024
"""Groups whose bounds a program compares per step."""

STEP = 32
"""Columns of a group that are summed per step."""

WARPS = 4
"""Warps per program of `measure_kernel` or `choose_kernel`."""

REMOVED = 256
"""Removed items that are compared per step."""

SUM_ERROR = 2.0**-21
"""Error bound per product of an n-term dot product, relative to the sum of the products' magnitudes. It
covers two sums: on tensor cores, which truncate instead of rounding, n 2^-22 is twice the measured error
(Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021); float32 sums in any order stay below
n 2^-23."""

MOST_BITS = 120
"""Exponent limit: queries are scaled by powers of 2 from 2^-MOST_BITS to 2^MOST_BITS."""


class Rounded(NamedTuple):
    """16-bit queries and the facts for bounds that `round_kernel` writes."""

    rows: Tensor
    """[B, E'], 16 bits per entry; E' is a multiple of 8."""
    facts: Tensor
    """[B, 3] float32, see `round_kernel`."""
    share: Tensor
    """[1] float32, see `round_kernel`."""


def run(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopK:
    """Runs `top_k`; the arguments have been validated."""
    if not len(queries) or not len(items):
        scores = torch.full((len(queries), k), -torch.inf, device=queries.device)
        return TopK(scores, torch.full_like(scores, -1, dtype=torch.int64))
    queries, items = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (queries, items))
    rounded = round_queries(queries)
    best = torch.empty(len(queries), block_width(k), dtype=torch.int64, device=queries.device)
    on_device = Removed(removed, removed_lengths, queries.device)
    for start in range(0, len(queries), CHUNK_QUERIES):
        chunk = slice(start, start + CHUNK_QUERIES)
        part = Rounded(rounded.rows[chunk], rounded.facts[chunk], rounded.share)
        _search(_Search(queries[chunk], items, k, part, on_device, start, best[chunk]))
    best = best[:, :k].sort(dim=1, descending=True).values
    scores = scores_of(best)
    return TopK(scores, items_of(best).masked_fill(scores == -torch.inf, -1))


class Removed:
    """Removed items on the device, copied at first use, when the device is already busy."""

    def __init__(self, items: Tensor, lengths: Tensor, device: torch.device) -> None:
        self._items, self._lengths, self._device = items, lengths, device

    @cached_property
    def _sent(self) -> Tensor:
        """Offsets and items, int64 [E + R]; E is B + 1 rounded up to even, so that the items begin at a
        multiple of 16 bytes.

        The memory is pinned: a copy from pageable memory would wait for all work queued on the device. NumPy
        fills it: PyTorch copies 32,768 numbers or more with several threads, which took 10 ms and more on a
        host with shared cores.
        """
        first = _up(len(self._lengths) + 1, 2)
        pinned = self._device.type == "cuda"
        packed = torch.empty(first + len(self._items), dtype=torch.int64, pin_memory=pinned)
        numbers = packed.numpy()
        numbers[:1] = 0
        numbers[1 : len(self._lengths) + 1] = self._lengths.numpy().cumsum()
        numbers[first:] = self._items.numpy()
        return packed.to(self._device, non_blocking=True)

    @property
    def items(self) -> Tensor:
        """int64 [R], the removed items."""
        return self._sent[_up(len(self._lengths) + 1, 2) :]

    @property
    def offsets(self) -> Tensor:
        """int64 [B + 1], the first removed item of each query, and the end."""
        return self._sent[: len(self._lengths) + 1]


class _Search(NamedTuple):
    queries: Tensor
    items: Tensor
    k: int
    rounded: Rounded
    removed: Removed
    first_query: int
    best: Tensor


def _search(search: _Search) -> None:
    """Merges the best of all items into `best`, chunk by chunk."""
    items, device = search.items, search.items.device
    columns = search.rounded.rows.shape[1]
    copied = 2 * columns + (0 if items.dtype == torch.float32 else 4 * items.shape[1])
    blocks = BLOCKS[padded_width(int(items.shape[1]))]
    chunk = chunk_of(len(search.queries), copied, len(items), blocks.group)
    groups = _up(chunk, blocks.group) // blocks.group
    maxima = torch.empty(len(search.queries) * _up(groups, 16), dtype=torch.int32, device=device)
    widths = torch.empty(groups, dtype=torch.float32, device=device)
    copies = torch.empty(chunk, columns, dtype=torch.float16, device=device)
    for first in range(0, len(items), chunk):
        part = items[first : first + chunk].float()
        groups = _up(len(part), blocks.group) // blocks.group
        rows = copies[: len(part)]
        measure(part, rows, widths, search.rounded.share, blocks.group)
        scores = maxima[: len(search.queries) * _up(groups, 16)].view(len(search.queries), -1)
        launch_coarse(search.rounded.rows, rows, scores, groups, blocks)
        choose(search, scores, widths, first, part, blocks.group)


def chunk_of(num_queries: int, item_bytes: int, num_items: int, group: int) -> int:
    """Returns the number of items per chunk: whole groups, with chunks of about equal size; `item_bytes` are
    those of an item's copies."""
    most = min(CHUNK_BYTES // (4 * num_queries) * group, CHUNK_BYTES // item_bytes)
    most = max(most // group, 1) * group
    chunks = -(-num_items // most)
    return _up(-(-num_items // chunks), group)


def round_queries(queries: Tensor) -> Rounded:
    """Launches `round_kernel`."""
    width = int(queries.shape[1])
    rows = queries.new_empty(len(queries), _up(width, 8), dtype=torch.float16)
    rounded = Rounded(rows, queries.new_empty(len(queries), 3), queries.new_zeros(1))
    round_kernel[(len(queries),)](
        queries,
        *rounded,
        queries.stride(0),
        rows.stride(0),
        SUM_ERROR * width,
        D=width,
        BLOCK_D=padded_width(width),
        MOST_BITS=MOST_BITS,
        num_warps=1,
    )
    return rounded


def measure(items: Tensor, rows: Tensor, widths: Tensor, share: Tensor, group: int) -> None:
    """Writes the bounds of groups to `widths`, and rounded items to `rows`."""
    width = int(items.shape[1])
    measure_kernel[(_up(len(items), group) // group,)](
        items,
        rows,
        widths,
        share,
        len(items),
        items.stride(0),
        rows.stride(0),
        D=width,
        BLOCK_D=padded_width(width),
        STEP=STEP,
        GROUP=group,
        num_warps=WARPS,
    )


def launch_coarse(rows: Tensor, items: Tensor, maxima: Tensor, num_groups: int, blocks: Blocks) -> None:
    """Launches `coarse_kernel`, which writes the largest score of each group to `maxima`."""
    columns = padded_width(rows.shape[1])
    tiles = -(-len(rows) // blocks.queries)
    per_part = part_of(tiles, num_groups, items.device)
    coarse_kernel[(tiles * -(-num_groups // per_part),)](
        TensorDescriptor.from_tensor(rows, [blocks.queries, columns]),
        TensorDescriptor.from_tensor(items, [blocks.group, columns]),
        maxima,
        len(rows),
        num_groups,
        per_part,
        maxima.stride(0),
        BLOCK_M=blocks.queries,
        GROUP=blocks.group,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def part_of(tiles: int, num_groups: int, device: torch.device) -> int:
    """Returns the number of groups per program: fewer than `PART` where there would be too few programs."""
    programs = 8 * num_processors(device)
    return max(1, min(PART, tiles * num_groups // programs))


def choose(search: _Search, maxima: Tensor, widths: Tensor, first: int, items: Tensor, group: int) -> None:
    """Scores the groups of a chunk that may hold one of the best items, and updates `best`."""
    width, num_items = int(items.shape[1]), len(items)
    choose_kernel[(len(search.queries),)](
        maxima,
        widths,
        search.queries,
        search.rounded.facts,
        items,
        search.removed.items,
        search.removed.offsets[search.first_query :],
        search.best,
        first,
        num_items,
        _up(num_items, group) // group,
        search.k,
        maxima.stride(0),
        search.queries.stride(0),
        items.stride(0),
        D=width,
        BLOCK_D=padded_width(width),
        STEP=STEP,
        GROUP=group,
        K=search.best.shape[1],
        CLASSES=CLASSES,
        REMOVED=REMOVED,
        num_warps=WARPS,
    )


def padded_width(width: int) -> int:
    """Returns the columns of a block that holds whole rows."""
    return block_width(width, least=64)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


# Kernels can read module constants only as constexpr.
LAST_ITEM = tl.constexpr(2**32 - 1)
NO_KEY = tl.constexpr(-(2**63))
NOTHING = tl.constexpr(float("-inf"))
ANYTHING = tl.constexpr(float("inf"))
HUGE = tl.constexpr(2.0**100)
"""Exclusive limit on bounds. A bound is at least 2^-21 of the product of two lengths, so below this limit no
sum of products overflows."""

UPWARD = tl.constexpr(1 + 2.0**-12)
"""Factor that exceeds the rounding error of a length or a bound."""

SMALLEST = tl.constexpr(2.0**-62)
"""Numbers below this may have squares that round to zero; each such number may lower a computed length by at
most this much."""

ALMOST_ZERO = tl.constexpr(2.0**-120)
"""Exceeds any product that is rounded to zero."""

TURNS = tl.constexpr(24)
"""Steps of a binary search for a 32-bit number, whose last 8 bits do not matter."""


@triton.jit
def _rising(score):
    """Returns int32 numbers in the order of float32 scores; both zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key(score, item):
    """Computes `keys_of` inside kernels."""
    return (_rising(score).to(tl.int64) << 32) + (LAST_ITEM - item)


@triton.jit
def round_kernel(
    queries, rows, facts, share, stride_queries, stride_rows, sum_error,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MOST_BITS: tl.constexpr,
):  # fmt: skip
    """Writes rows [queries, stride_rows]: each query divided by a power of 2 that brings its largest
    magnitude near 1, rounded to 16 bits; zero past column D. One program runs per query.

    facts: [queries, 3] float32: the power of 2 by which to multiply rounded scores; then, for a bound, the
        factor of the widths and the summand.
    share: [1], zero on entry: the largest error from rounding any of these queries and from sums, relative to
        the length of an item.
    """
    query = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    q = tl.load(queries + query * stride_queries + column, mask=column < D, other=0.0)
    greatest = tl.max(tl.abs(q), 0)
    exponent = (greatest.to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.where(greatest < ANYTHING, tl.maximum(tl.minimum(exponent, MOST_BITS), -MOST_BITS), 0)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = (q * inverse).to(rows.dtype.element_ty)
    tl.store(rows + query * stride_rows + column, rounded, mask=column < stride_rows)
    exact = q.to(tl.float64)
    rest = exact - rounded.to(tl.float64) * scale.to(tl.float64)
    length = tl.sqrt(tl.sum(exact * exact, 0))
    of_rest = tl.sqrt(tl.sum(rest * rest, 0)) / tl.where(length > 0, length, 1.0)
    known = (length < ANYTHING) & (of_rest < ANYTHING)  # False for NaN, too
    tl.store(facts + 3 * query, scale)
    tl.store(facts + 3 * query + 1, tl.where(known, length * UPWARD, ANYTHING).to(tl.float32))
    tl.store(facts + 3 * query + 2, tl.where(length > 0, D * ALMOST_ZERO, 0.0))
    tl.atomic_max(share, (tl.where(known, of_rest, 0.0) * UPWARD).to(tl.float32) + sum_error)


@triton.jit(do_not_specialize=["num_items"])
def measure_kernel(
    items, copy, widths, share, num_items, stride, stride_copy,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes widths [groups] float32: for a query of length 1, the largest error bound of the group's items;
    and copy [items, stride_copy], the rounded items, zero past column D.

    share: the error from rounding queries and from sums, relative to an item's length.
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
        rounded = x.to(copy.dtype.element_ty)
        tl.store(copy + start * stride_copy + column, rounded, mask=inside & (column < stride_copy))
        rest = x - rounded.to(tl.float32)
        squares_of_rest += tl.sum(rest * rest, 1)
    missing = D * SMALLEST
    of_share = tl.load(share)
    width = of_share * (tl.sqrt(squares) + missing)
    width += (1.0 + of_share) * (tl.sqrt(squares_of_rest) + missing)
    width = tl.where(width < ANYTHING, width * UPWARD, ANYTHING)  # also replaces NaN
    tl.store(widths + group, tl.max(tl.where(row < num_items, width, 0.0), 0))


@triton.jit(do_not_specialize=["num_queries", "num_groups", "groups_per_part"])
def coarse_kernel(
    query_rows, item_rows, maxima, num_queries, num_groups, groups_per_part, stride_maxima,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes maxima [queries, stride_maxima] int32, the largest rounded score of each group. Rows past the
    last item count as items of zeros.

    One program runs per BLOCK_M queries and part of the groups; queries vary fastest, so that concurrent
    programs share items.
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
        bits = tl.max(score, 1).to(tl.int32, bitcast=True) & -2
        tl.store(out + group, bits, mask=query < num_queries)


@triton.jit
def _bounds(maxima, widths, group, num_groups, scale, reach, slack):
    """Returns, float32 for each group, a lower and an upper bound of the best exact score among items that
    are not removed."""
    inside = group < num_groups
    bits = tl.load(maxima + group, mask=inside, other=0)
    score = (bits & -2).to(tl.float32, bitcast=True) * scale
    error = tl.load(widths + group, mask=inside, other=0.0) * reach + slack
    known = inside & (error < HUGE) & (score == score)  # False for NaN, too
    below = tl.where(known & ((bits & 1) == 0), score - error, NOTHING)
    return below, tl.where(known, score + error, ANYTHING)


@triton.jit
def _threshold(
    maxima, widths, whole_groups, scale, reach, slack, wanted,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Returns a score that does not exceed that of the wanted-th best item; -inf if there may be no such
    item.

    Groups are dealt out to classes; at least `wanted` classes contain an item with the returned score or a
    better one.
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
    query, items, group, first, num_items, stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns exact keys, int64 [GROUP]; `NO_KEY` for items that cannot be found."""
    row = group * GROUP + tl.arange(0, GROUP).to(tl.int64)
    inside = row < num_items
    score = tl.zeros([GROUP], tl.float32)
    for start in tl.static_range(0, BLOCK_D, STEP):
        column = start + tl.arange(0, STEP)
        mask = inside[:, None] & (column < D)[None, :]
        x = tl.load(items + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.load(query + column, mask=column < D, other=0.0)
        score += tl.sum(x * q[None, :], 1)
    return tl.where(inside & (score > NOTHING), _key(score, first + row), NO_KEY)


@triton.jit
def _mark_removed(
    maxima, removed, removed_start, removed_end, first, num_items,
    GROUP: tl.constexpr, REMOVED: tl.constexpr,
):  # fmt: skip
    """Sets the last bit of groups with a removed item. Threads that set the same bit do not conflict."""
    for start in range(removed_start, removed_end, REMOVED):
        place = start + tl.arange(0, REMOVED)
        item = tl.load(removed + place, mask=place < removed_end, other=-1)
        here = (item >= first) & (item < first + num_items)
        pointer = maxima + tl.where(here, item - first, 0) // GROUP
        tl.store(pointer, tl.load(pointer, mask=here, other=0) | 1, mask=here)
    tl.debug_barrier()  # makes the stores visible to the program's other threads, which read them next


@triton.jit
def _is_removed(item, removed, removed_start, removed_end, REMOVED: tl.constexpr):
    is_removed = tl.full([], 0, tl.int32)
    for start in range(removed_start, removed_end, REMOVED):
        place = start + tl.arange(0, REMOVED)
        gone = tl.load(removed + place, mask=place < removed_end, other=-1)
        is_removed = tl.maximum(is_removed, tl.max((gone == item).to(tl.int32), 0))
    return is_removed != 0


@triton.jit
def _worst(best, k, K: tl.constexpr):
    """Returns the k-th best key."""
    return tl.min(tl.where(tl.arange(0, K) < k, best, 2**63 - 1), 0)


@triton.jit(do_not_specialize=["first", "num_items", "num_groups", "k"])
def choose_kernel(
    maxima, widths, queries, facts, items, removed, removed_offsets, best,
    first, num_items, num_groups, k, stride_maxima, stride_queries, stride_items,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, CLASSES: tl.constexpr, REMOVED: tl.constexpr,
):  # fmt: skip
    """Updates best [queries, K] int64, the keys of the k best items in any order, with the items of a chunk,
    which begin with `first`. One program runs per query.

    facts are as `round_kernel` writes them; removed [R] int64, removed_offsets [queries + 1] int64.
    """
    query = tl.program_id(0).to(tl.int64)
    maxima += query * stride_maxima
    queries += query * stride_queries
    scale = tl.load(facts + 3 * query)
    reach = tl.load(facts + 3 * query + 1)
    slack = tl.load(facts + 3 * query + 2)
    removed_start = tl.load(removed_offsets + query)
    removed_end = tl.load(removed_offsets + query + 1)
    _mark_removed(maxima, removed, removed_start, removed_end, first, num_items, GROUP, REMOVED)
    whole_groups = num_items // GROUP
    least = _threshold(maxima, widths, whole_groups, scale, reach, slack, k, CLASSES)
    slot = tl.arange(0, K)
    # Initially the keys are empty but distinct, so that only one is replaced at a time.
    empty = _key(tl.full([K], NOTHING, tl.float32), slot.to(tl.int64))
    kept = tl.load(best + query * K + slot, mask=(slot < K) & (first > 0), other=0)
    kept = tl.where(first > 0, kept, empty)
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
                queries, items, chosen, first, num_items, stride_items, D, BLOCK_D, STEP, GROUP
            )
            better = tl.max(keys, 0)
            while better > worst:
                candidate = LAST_ITEM - (better & LAST_ITEM)
                gone = _is_removed(candidate, removed, removed_start, removed_end, REMOVED)
                kept = tl.where((kept == worst) & (not gone), better, kept)
                keys = tl.where(keys == better, NO_KEY, keys)
                worst = _worst(kept, k, K)
                better = tl.max(keys, 0)
            floor = tl.maximum(floor, worst)
            bounds = tl.where(bounds == top, NO_KEY, bounds)
            top = tl.max(bounds, 0)
    tl.store(best + query * K + slot, kept)
