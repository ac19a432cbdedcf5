"""What the forward and the backward kernels share: work items, loads of blocks, the mask, the bias, SiLU.

All of it is inlined into the kernels. Scores come in two orientations, [rows, keys] where a program owns rows
and [keys, rows] where it owns keys, so positions are given ready to broadcast: `i` of rows, `j` of keys.

Numbers that belong together travel as tuples:

    rule    num_contextual, window, prefix, group_size
    RULE    WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS: which parts of the mask there are

FAST says what only GPUs have: 0 nothing, 1 inline PTX, 2 also a sigmoid of 11 bits, for 16 bits.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.work_list import reference

# What a kernel reads of module scope must be a constexpr.
START = tl.constexpr(reference.START)
LENGTH = tl.constexpr(reference.LENGTH)
HISTORY_END = tl.constexpr(reference.HISTORY_END)
FIRST = tl.constexpr(reference.FIRST)
COUNT_A = tl.constexpr(reference.COUNT_A)
START_B = tl.constexpr(reference.START_B)
COUNT_B = tl.constexpr(reference.COUNT_B)
START_C = tl.constexpr(reference.START_C)
COUNT_C = tl.constexpr(reference.COUNT_C)
UNMASKED_AT = tl.constexpr(reference.UNMASKED_AT)
UNMASKED_START = tl.constexpr(reference.UNMASKED_START)
UNMASKED_COUNT = tl.constexpr(reference.UNMASKED_COUNT)
NUM_COLUMNS = tl.constexpr(reference.NUM_COLUMNS)
NEW = tl.constexpr(reference.NEW)
CACHE_START = tl.constexpr(reference.CACHE_START)
CACHE_LENGTH = tl.constexpr(reference.CACHE_LENGTH)
PART = tl.constexpr(reference.PART)
PART_FIRST = tl.constexpr(reference.PART_FIRST)
PART_LENGTH = tl.constexpr(reference.PART_LENGTH)
NUM_CACHED_COLUMNS = tl.constexpr(reference.NUM_CACHED_COLUMNS)

VARYING = ("num_items", "num_contextual", "window", "prefix", "group_size", "num_buckets")
VARYING += ("position_stride", "time_stride", "reach")
"""Parameters that differ from batch to batch or model to model: kernels are not compiled anew for them."""

RAGGED_ROWS = tl.constexpr(2**30)
"""No batch has as many tokens."""

UNSEEN = tl.constexpr(-(2.0**20))
"""A score so low that its sigmoid, SiLU and its slope are exactly 0: of pairs that do not count."""


@triton.jit
def load_tile(item):
    """The tile of a work item: first row, length and first target of the sample; the tile's first token."""
    return (
        tl.load(item + START),
        tl.load(item + LENGTH).to(tl.int32),
        tl.load(item + HISTORY_END).to(tl.int32),
        tl.load(item + FIRST).to(tl.int32),
    )


@triton.jit
def load_runs(item):
    """The blocks that a work item visits, for `num_masked` and `masked_block`."""
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
    """How many of the blocks need the mask."""
    count_a, _, count_b, _, count_c, _, unmasked_count = runs
    return count_a + count_b + count_c - unmasked_count


@triton.jit
def masked_block(number, runs):
    """The block number `number` of those that need the mask."""
    count_a, start_b, count_b, start_c, _, unmasked_at, unmasked_count = runs
    number = tl.where(number >= unmasked_at, number + unmasked_count, number)
    in_b = number - count_a + start_b
    in_c = number - count_a - count_b + start_c
    return tl.where(number < count_a, number, tl.where(number < count_a + count_b, in_b, in_c))


@triton.jit
def num_blocks(runs):
    """How many blocks there are, with the mask and without."""
    count_a, _, count_b, _, count_c, _, _ = runs
    return count_a + count_b + count_c


@triton.jit
def block_at(number, runs):
    """The block number `number` of all, in ascending order, and whether it needs the mask."""
    count_a, start_b, count_b, start_c, _, unmasked_at, unmasked_count = runs
    in_b = number - count_a + start_b
    in_c = number - count_a - count_b + start_c
    block = tl.where(number < count_a, number, tl.where(number < count_a + count_b, in_b, in_c))
    return block, (number < unmasked_at) | (number >= unmasked_at + unmasked_count)


@triton.jit
def head_of(tensor, start, length, head, strides, DESCRIBED: tl.constexpr = False):
    """One head of a sample, for `load_block`. DESCRIBED: `tensor` is a descriptor of `ragged_descriptor`."""
    if DESCRIBED:
        return tensor, (start + length).to(tl.int32), (head * strides[1]).to(tl.int32)
    else:
        return tensor + start * strides[0] + head * strides[1], strides[0], 0


@triton.jit
def load_block(
    rows, first, length,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INSIDE: tl.constexpr,
    DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """[ROWS, COLUMNS]: tokens from `first` on; zero from token `length` and from column WIDTH on.

    rows: what `head_of` returns. INSIDE: all tokens are known to lie before `length`.
    """
    if DESCRIBED:
        desc, end, column = rows
        box = desc.load([RAGGED_ROWS, end, RAGGED_ROWS - length + first, column])
        return box.reshape([ROWS, COLUMNS])
    else:
        return _load_pointers(rows, first, length, WIDTH, ROWS, COLUMNS, INSIDE)


@triton.jit
def _load_pointers(
    rows, first, length,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    base, stride, _ = rows
    token = tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, COLUMNS)[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride + token * stride + place
    if INSIDE:
        if WIDTH == COLUMNS:
            return tl.load(pointer)
        else:
            return tl.load(pointer, mask=place < WIDTH, other=0.0)
    elif WIDTH == COLUMNS:
        return tl.load(pointer, mask=first + token < length, other=0.0)
    else:
        return tl.load(pointer, mask=(first + token < length) & (place < WIDTH), other=0.0)


@triton.jit
def store_block(
    base, first, length, stride, value, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The reverse of `load_block`, rounded to the type of the memory."""
    token = tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, COLUMNS)[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride + token * stride + place
    inside = first + token < length
    if WIDTH != COLUMNS:
        inside = inside & (place < WIDTH)
    tl.store(pointer, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def relative_position(i, history_end, group_size, RULE: tl.constexpr):
    """`r` of token `i`: the targets of each group stand directly behind the history."""
    if RULE[2]:
        return tl.where(i < history_end, i, history_end + (i - history_end) % group_size)
    else:
        return tl.minimum(i, history_end)


@triton.jit
def tanh(x):
    """To about 11 bits, one instruction. float16 has as many, and its results are no further off for it."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x))."""
    if FAST == 2:
        return 0.5 * tanh(0.5 * x) + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def silu(score, HALVED: tl.constexpr, FAST: tl.constexpr):
    """x sigmoid(x) of a score x; HALVED: `score` is x / 2, as the form with tanh takes it."""
    if HALVED and FAST == 2:
        return score * tanh(score) + score
    elif HALVED:
        return 2.0 * score * tl.sigmoid(2.0 * score)
    else:
        return score * sigmoid(score, FAST)


@triton.jit
def silu_and_slope(score, HALVED: tl.constexpr, FAST: tl.constexpr):
    """`silu` and its derivative; HALVED: twice that, u (1 + x (2 - u) / 2) with u = 2 sigmoid(x)."""
    if HALVED:
        if FAST == 2:
            doubled = tanh(score) + 1.0
        else:
            doubled = 2.0 * tl.sigmoid(2.0 * score)
        weight = score * doubled
        return weight, doubled + weight * (2.0 - doubled)
    else:
        sigma = sigmoid(score, FAST)
        weight = score * sigma
        return weight, sigma + weight * (1.0 - sigma)
