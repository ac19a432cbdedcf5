"""Read the items of a work list inside kernels; `columns` explains their numbers."""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.work_list import columns

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
