"""Reads the items of a work list inside kernels; builds work lists with two kernels.

One makes the items, the other puts them in order. Two launches replace about a hundred operations on small
tensors. The lists equal those of `reference`; tests compare every number. A program handles several tiles and
keeps each number of a tile in an int64 register; an interval is a pair of such numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.hstu_attention.mask_forms import rule_of, rules, tile_intervals
from recsys.ops.hstu_attention.work_list import reference as columns
from recsys.ops.hstu_attention.work_list.reference import Tiling, num_tiles_of, sections_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.launch import launch

# Kernels can read module constants only as constexpr.
START = tl.constexpr(columns.START)

LENGTH = tl.constexpr(columns.LENGTH)

HISTORY_END = tl.constexpr(columns.HISTORY_END)

FIRST = tl.constexpr(columns.FIRST)

COUNT_A = tl.constexpr(columns.COUNT_A)

START_B = tl.constexpr(columns.START_B)

COUNT_B = tl.constexpr(columns.COUNT_B)

START_C = tl.constexpr(columns.START_C)

COUNT_C = tl.constexpr(columns.COUNT_C)

UNMASKED_AT = tl.constexpr(columns.UNMASKED_AT)

UNMASKED_START = tl.constexpr(columns.UNMASKED_START)

UNMASKED_COUNT = tl.constexpr(columns.UNMASKED_COUNT)

NUM_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)

NEW = tl.constexpr(columns.NEW)

CACHE_START = tl.constexpr(columns.CACHE_START)

CACHE_LENGTH = tl.constexpr(columns.CACHE_LENGTH)

PART = tl.constexpr(columns.PART)

PART_FIRST = tl.constexpr(columns.PART_FIRST)

PART_LENGTH = tl.constexpr(columns.PART_LENGTH)

NUM_CACHED_COLUMNS = tl.constexpr(columns.NUM_CACHED_COLUMNS)


@triton.jit
def load_tile(item):
    """Return START, LENGTH, HISTORY_END and FIRST of an item's tile."""
    return (
        tl.load(item + START),
        tl.load(item + LENGTH).to(tl.int32),
        tl.load(item + HISTORY_END).to(tl.int32),
        tl.load(item + FIRST).to(tl.int32),
    )


@triton.jit
def load_runs(item):
    """Return the runs of blocks that an item visits, for the functions below."""
    return (
        tl.load(item + COUNT_A).to(tl.int32),
        tl.load(item + START_B).to(tl.int32),
        tl.load(item + COUNT_B).to(tl.int32),
        tl.load(item + START_C).to(tl.int32),
        tl.load(item + COUNT_C).to(tl.int32),
        tl.load(item + UNMASKED_AT).to(tl.int32),
        tl.load(item + UNMASKED_COUNT).to(tl.int32),
    )


@triton.jit
def num_masked(runs):
    """Return how many of the blocks need the mask."""
    count_a, _, count_b, _, count_c, _, unmasked_count = runs
    return count_a + count_b + count_c - unmasked_count


@triton.jit
def masked_block(number, runs):
    """Return the block with number `number` among those that need the mask."""
    count_a, start_b, count_b, start_c, _, unmasked_at, unmasked_count = runs
    number = tl.where(number >= unmasked_at, number + unmasked_count, number)
    in_b = number - count_a + start_b
    in_c = number - count_a - count_b + start_c
    return tl.where(number < count_a, number, tl.where(number < count_a + count_b, in_b, in_c))


@triton.jit
def num_blocks(runs):
    """Return the number of blocks, with and without the mask."""
    count_a, _, count_b, _, count_c, _, _ = runs
    return count_a + count_b + count_c


@triton.jit
def block_at(number, runs):
    """Return the block with number `number` among all blocks, ascending, and whether it needs the mask."""
    count_a, start_b, count_b, start_c, _, unmasked_at, unmasked_count = runs
    in_b = number - count_a + start_b
    in_c = number - count_a - count_b + start_c
    block = tl.where(number < count_a, number, tl.where(number < count_a + count_b, in_b, in_c))
    return block, (number < unmasked_at) | (number >= unmasked_at + unmasked_count)


LANES, CACHED_LANES = 128, 64
"""Tiles per program, without and with a cache."""

SAMPLES = 32
"""Samples that a program scans per step to find those its tiles belong to."""

ORDERED, COMPARED = 32, 256
"""Items that a program puts in order, and items that it compares them with per step."""

MOST_COMPARED = 2**14
"""Above this number of items, sorting is faster than comparing all pairs."""


def row_work(mask: AttentionMask, layout: SequenceLayout, tiling: Tiling) -> Tensor:
    """Build the list that `work_list.row_work` describes."""
    num_tiles = num_tiles_of(layout, tiling.tile, tiling.tail, tiling.strip)
    return _items(mask, layout, num_tiles, tiling, keys=False)


def key_work(mask: AttentionMask, layout: SequenceLayout, tiling: Tiling) -> Tensor:
    """Build the list that `work_list.key_work` describes."""
    return _items(mask, layout, num_tiles_of(layout, tiling.tile), tiling, keys=True)


def cached_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int = 1,
) -> Tensor:
    """Build the list that `work_list.cached_work` describes."""
    num_items = num_tiles_of(layout, tile) * parts
    items, work = _empty(layout, num_items, NUM_CACHED_COLUMNS.value)
    if num_items == 0:
        return items
    samples = (layout.offsets, layout.lengths, layout.num_targets, cache_layout.offsets, cache_layout.lengths)
    launch(
        cached_items_kernel,
        -(-num_items // CACHED_LANES),
        (*samples, items, work),
        (num_items, layout.batch_size, *rule_of(mask, cache_layout.num_contextual), parts),
        {
            "TILE": tile,
            "BLOCK": block,
            **_parts_of(mask),
            "LANES": CACHED_LANES,
            "SAMPLES": SAMPLES,
            "num_warps": 4,
        },
    )
    return _sorted(items, work)


def _items(mask: AttentionMask, layout: SequenceLayout, num_tiles: int, tiling: Tiling, keys: bool) -> Tensor:
    items, work = _empty(layout, num_tiles, NUM_COLUMNS.value)
    if num_tiles == 0:
        return items
    tile, block, section, tail, strip = tiling
    sections = layout.lengths if section is None else sections_of(layout.lengths, section)
    launch(
        items_kernel,
        -(-num_tiles // LANES),
        (layout.offsets, layout.lengths, layout.num_targets, sections, items, work),
        (num_tiles, layout.batch_size, *rule_of(mask, layout.num_contextual), layout.total_len, tail or 0),
        {
            "KEYS": keys,
            "TILE": tile,
            "STRIP": strip or tile,
            "BLOCK": block,
            "SECTIONED": section is not None,
            **_parts_of(mask),
            "TAIL": tail is not None,
            "LANES": LANES,
            "SAMPLES": SAMPLES,
            "num_warps": 4,
        },
    )
    return _sorted(items, work)


def _empty(layout: SequenceLayout, num_items: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized items, and for each item the number to sort it by."""
    items = torch.empty(num_items, num_columns, dtype=torch.int64, device=layout.device)
    return items, torch.empty(num_items, dtype=torch.int64, device=layout.device)


def _parts_of(mask: AttentionMask) -> dict[str, bool]:
    """Return the parts of the mask that these kernels ask for: they take groups of any size."""
    return {name: present for name, present in rules(mask).items() if name != "GROUPED"}


def _sorted(items: Tensor, work: Tensor) -> Tensor:
    """Return the items with the largest number first; equal ones keep their order."""
    num_items, num_columns = items.shape
    if num_items > MOST_COMPARED:
        return items.index_select(0, torch.argsort(work, descending=True, stable=True))
    ordered = torch.empty_like(items)
    launch(
        order_kernel,
        -(-num_items // ORDERED),
        (items, work, ordered),
        (num_items,),
        {
            "COLUMNS": num_columns,
            "PADDED": 1 << (num_columns - 1).bit_length(),
            "LANES": ORDERED,
            "COMPARED": COMPARED,
            "num_warps": 4,
        },
    )
    return ordered


@triton.jit
def _rows_missing(lengths, TILE: tl.constexpr, STRIP: tl.constexpr):
    """Return how many rows before each sample its first tile begins: none if a strip is a whole tile."""
    strips = (lengths.to(tl.int32) + STRIP - 1) // STRIP
    return (TILE // STRIP - 1 - (strips + TILE // STRIP - 1) % (TILE // STRIP)) * STRIP


@triton.jit
def _left_out(oldest, missing, contextual, TILE: tl.constexpr):
    """Return the tiles [behind, end) that hold only history older than token `oldest`."""
    end = (tl.maximum(oldest, contextual) + missing) // TILE
    behind = tl.where(contextual > 0, (contextual + missing + TILE - 1) // TILE, 0)
    return tl.minimum(end, behind), end


@triton.jit
def _sample_of(
    tile, lengths, num_targets, batch_size, contextual, tail,
    TILE: tl.constexpr, STRIP: tl.constexpr, TAIL: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Return the sample of each tile (B for numbers past the last tile) and the number of tiles in earlier
    samples.

    With TAIL, tiles that hold only history older than the newest `tail` tokens are not counted.
    """
    sample, before = tile * 0, tile * 0
    passed = tl.sum(tile * 0)
    for block in range(0, batch_size, SAMPLES):
        candidate = block + tl.arange(0, SAMPLES)
        is_sample = candidate < batch_size
        length = tl.load(lengths + candidate, mask=is_sample, other=0)
        count = (length + TILE - 1) // TILE
        if TAIL:
            targets = tl.load(num_targets + candidate, mask=is_sample, other=0)
            oldest = tl.maximum(length - targets - tail, 0)
            behind, end = _left_out(oldest, _rows_missing(length, TILE, STRIP), contextual, TILE)
            count -= tl.where(is_sample, end - behind, 0)
        ends = passed + tl.cumsum(count, 0)
        is_before = (ends[None, :] <= tile[:, None]) & is_sample[None, :]
        sample += tl.sum(is_before.to(tl.int64), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        passed += tl.sum(count)
    return sample, before


@triton.jit
def _longer(a, b):
    """Return the longer of two intervals."""
    is_a = a[1] - a[0] >= b[1] - b[0]
    return tl.where(is_a, a[0], b[0]), tl.where(is_a, a[1], b[1])


@triton.jit
def _store(item, columns, inside):
    """Store the numbers of a tuple in consecutive columns."""
    for column in tl.static_range(len(columns)):
        tl.store(item + column, columns[column], mask=inside)


@triton.jit
def _clipped(interval, low, high):
    """Return the part of an interval that lies in [low, high), counted from `low`; [0, 0) if it is empty."""
    start = tl.minimum(tl.maximum(interval[0], low), high) - low
    end = tl.minimum(tl.maximum(interval[1], low), high) - low
    return tl.where(end > start, start, 0), tl.where(end > start, end, 0)


@triton.jit
def _without_older(kinds, oldest):
    """Return the three intervals of rows that see a tile, with history only from `oldest` on.

    The last history row stays if no other rows see the tile: a program that visits no block would write
    nothing.
    """
    contextual, history, targets = kinds
    newer = tl.maximum(history[0], oldest)
    alone = (contextual[1] == 0) & (targets[1] == 0)
    newer = tl.where(alone, tl.maximum(tl.minimum(newer, history[1] - 1), 0), newer)
    return contextual, (newer, history[1]), targets


@triton.jit
def _unmasked_rows(history, targets, length, BLOCK: tl.constexpr):
    """Return the rows that see all keys of a tile."""
    # History rows and targets that see all keys form one interval when both reach the border between them.
    joined = (history[0] < history[1]) & (history[1] == targets[0]) & (targets[0] < targets[1])
    start, end = _longer((history[0], tl.where(joined, targets[1], history[1])), targets)
    # Rows past the end of a sample are loaded as zeros, so its last block may count as a full one.
    return start, tl.where(end == length, end + BLOCK - 1, end)


@triton.jit
def _runs(is_tile, hulls, free, BLOCK: tl.constexpr):
    """Return columns COUNT_A to UNMASKED_COUNT, with no blocks unless `is_tile`.

    The tile visits the tokens of the three intervals in `hulls`; the tokens of `free` need no mask.
    """
    end_a = tl.where(is_tile, (hulls[0][1] + BLOCK - 1) // BLOCK, 0)
    end_b = tl.where(is_tile, (hulls[1][1] + BLOCK - 1) // BLOCK, 0)
    end_c = tl.where(is_tile, (hulls[2][1] + BLOCK - 1) // BLOCK, 0)
    start_a, start_b, start_c = hulls[0][0] // BLOCK, hulls[1][0] // BLOCK, hulls[2][0] // BLOCK
    # A run begins where the runs before it end.
    count_a = tl.maximum(end_a - start_a, 0)
    ended = tl.where(count_a > 0, end_a, 0)
    start_b = tl.maximum(start_b, ended)
    count_b = tl.maximum(end_b - start_b, 0)
    ended = tl.where(count_b > 0, end_b, ended)
    start_c = tl.maximum(start_c, ended)
    count_c = tl.maximum(end_c - start_c, 0)
    full = (free[0] + BLOCK - 1) // BLOCK
    full_count = tl.where(is_tile, tl.maximum(free[1] // BLOCK - full, 0), 0)
    masked = tl.minimum(tl.maximum(full - start_a, 0), count_a)
    masked += tl.minimum(tl.maximum(full - start_b, 0), count_b)
    masked += tl.minimum(tl.maximum(full - start_c, 0), count_c)
    return count_a, start_b, count_b, start_c, count_c, masked, full, full_count


@triton.jit
def _store_runs(item, inside, is_tile, hulls, common, low, high, BLOCK: tl.constexpr):
    """Store columns COUNT_A to UNMASKED_COUNT for the tokens in [low, high), and return the number of
    blocks."""
    hulls = (_clipped(hulls[0], low, high), _clipped(hulls[1], low, high), _clipped(hulls[2], low, high))
    free = _longer(_clipped(common[0], low, high), _clipped(common[1], low, high))
    runs = _runs(is_tile, hulls, free, BLOCK)
    _store(item, runs, inside)
    return runs[0] + runs[2] + runs[4]


@triton.jit(
    do_not_specialize=[
        "num_tiles", "batch_size", "contextual", "window", "prefix", "group_size", "total_len", "tail",
    ],
)  # fmt: skip
def items_kernel(
    offsets, lengths, num_targets, sections, items, work,
    num_tiles, batch_size, contextual, window, prefix, group_size, total_len, tail,
    KEYS: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
    SECTIONED: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    TAIL: tl.constexpr, LANES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Write items [num_tiles, NUM_COLUMNS] and work [num_tiles], the numbers to sort by, largest first.

    `sections` [B] holds the section of each sample. Items past the last tile of the last sample have length
    0.
    """
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = number < num_tiles
    LEFT_OUT: tl.constexpr = TAIL and not KEYS  # all tiles of keys stay; they visit fewer blocks
    sample, before = _sample_of(
        number, lengths, num_targets, batch_size, contextual, tail, TILE, STRIP, LEFT_OUT, SAMPLES
    )
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    history_end = length - tl.load(num_targets + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    place = number - before
    oldest = tl.maximum(history_end - tail, 0)
    if LEFT_OUT:
        behind, end = _left_out(oldest, _rows_missing(length, TILE, STRIP), contextual, TILE)
        place += tl.where(place >= behind, end - behind, 0)
    if STRIP < TILE:  # counted from the end of the tile: registers spill with `place * TILE`
        begin = tl.where(is_real, (place + 1) * TILE - _rows_missing(length, TILE, STRIP), TILE) - TILE
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
        free = _longer(common[0], common[1])
    is_tile = length > 0
    columns = (start, length, history_end, begin) + _runs(is_tile, hulls, free, BLOCK)
    _store(items + number * NUM_COLUMNS, columns, inside)
    count = columns[COUNT_A] + columns[COUNT_B] + columns[COUNT_C]
    if SECTIONED:
        section = tl.load(sections + sample, mask=is_real, other=0)
        count = tl.where(is_tile, (total_len - section) * (total_len // BLOCK + 2 * NUM_COLUMNS) + count, 0)
    tl.store(work + number, count, mask=inside)


@triton.jit(
    do_not_specialize=[
        "num_items", "batch_size", "contextual", "window", "prefix", "group_size", "parts",
    ],
)  # fmt: skip
def cached_items_kernel(
    offsets, lengths, num_targets, cache_offsets, cache_lengths, items, work,
    num_items, batch_size, contextual, window, prefix, group_size, parts,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    LANES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Write items [num_items, NUM_CACHED_COLUMNS], `parts` per tile, and work [num_items]."""
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = number < num_items
    tile, part = number // parts, number % parts
    sample, before = _sample_of(tile, lengths, num_targets, batch_size, 0, 0, TILE, TILE, False, SAMPLES)
    is_real = inside & (sample < batch_size)
    length = tl.load(lengths + sample, mask=is_real, other=0)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    kept = tl.load(cache_lengths + sample, mask=is_real, other=0)
    cache_start = tl.load(cache_offsets + sample, mask=is_real, other=0)
    new_history = length - tl.load(num_targets + sample, mask=is_real, other=0)
    history_end = new_history + kept
    first = tl.where(is_real, (tile - before) * TILE, 0)
    last = tl.minimum(first + TILE, length) - 1

    rule = (contextual, window, prefix, group_size)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, True, CONTEXTUAL_READS)
    hulls, common = tile_intervals(first, last, kept, history_end, length, rule, RULE, False)
    share = (kept + parts * BLOCK - 1) // (parts * BLOCK) * BLOCK
    part_first = tl.minimum(part * share, kept)
    part_end = tl.minimum((part + 1) * share, kept)
    whole = tl.where(part == parts - 1, kept + length, kept)
    item = items + number * NUM_CACHED_COLUMNS
    _store(item, (start, length, history_end, first), inside)
    is_tile = length > 0
    count = _store_runs(item + COUNT_A, inside, is_tile, hulls, common, part_first, part_end, BLOCK)
    count += _store_runs(item + COUNT_A + NEW, inside, is_tile, hulls, common, kept, whole, BLOCK)
    _store(item + CACHE_START, (cache_start, kept, part, part_first, part_end - part_first), inside)
    tl.store(work + number, count, mask=inside)


@triton.jit(do_not_specialize=["num_items"])
def order_kernel(
    items, work, ordered, num_items,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Write `items` [num_items, COLUMNS] to `ordered`, largest `work` first; equal ones keep their order.

    An item's place is the number of items that come before it.
    """
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = number < num_items
    own_work = tl.load(work + number, mask=inside, other=0)[:, None]
    place = tl.zeros([LANES], tl.int32)
    for block in range(0, num_items, COMPARED):
        compared = block + tl.arange(0, COMPARED)
        other_work = tl.load(work + compared, mask=compared < num_items, other=-1)[None, :]
        is_before = (other_work > own_work) | (
            (other_work == own_work) & (compared[None, :] < number[:, None])
        )
        place += tl.sum(is_before.to(tl.int32), 1)
    column = tl.arange(0, PADDED)[None, :]
    used = inside[:, None] & (column < COLUMNS)
    item = tl.load(items + number[:, None] * COLUMNS + column, mask=used, other=0)
    tl.store(ordered + place[:, None] * COLUMNS + column, item, mask=used)
