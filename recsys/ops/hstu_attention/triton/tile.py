"""Parts that the forward and backward kernels share: loads and stores of blocks, positions, SiLU.

Everything here is inlined into the kernels. Scores come in two orientations, [rows, keys] where a program
owns rows and [keys, rows] where it owns keys, so positions are passed ready to broadcast: `i` for rows, `j`
for keys.

`mask_forms` explains the tuples `rule` and `RULE`. FAST allows inline PTX and a sigmoid accurate to 11 bits,
for 16-bit operands; without it the instructions are portable.
"""

import triton
import triton.language as tl

from recsys.ops.runtime import descriptors

VARYING = ("num_items", "num_contextual", "window", "prefix", "group_size", "num_buckets")
VARYING += ("position_stride", "time_stride", "reach")
"""Parameters that vary with the batch or the model; kernels are not recompiled for them."""

RAGGED_ROWS = tl.constexpr(descriptors.RAGGED_ROWS)

UNSEEN = tl.constexpr(-(2.0**20))
"""Score of hidden pairs: so low that its sigmoid, SiLU and slope are exactly 0."""


@triton.jit
def head_of(tensor, start, length, head, strides, DESCRIBED: tl.constexpr = False):
    """Select one head of a sample for `load_block`. DESCRIBED: `tensor` comes from `ragged_descriptor`."""
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
    """Load [ROWS, COLUMNS]: tokens from `first` on; zeros from token `length` and from column WIDTH on.

    rows: the result of `head_of`. INSIDE: all tokens are known to lie before `length`.
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
    """Store a block of the shape that `load_block` loads, rounded to the dtype of the memory."""
    token = tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, COLUMNS)[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride + token * stride + place
    inside = first + token < length
    if WIDTH != COLUMNS:
        inside = inside & (place < WIDTH)
    tl.store(pointer, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def relative_position(i, history_end, group_size, RULE: tl.constexpr):
    """Return the position that the bias uses for token `i`: each target group directly follows the
    history."""
    if RULE[2]:
        return tl.where(i < history_end, i, history_end + (i - history_end) % group_size)
    else:
        return tl.minimum(i, history_end)


@triton.jit
def tanh(x):
    """Compute tanh with one instruction, accurate to about 11 bits, as many as float16 has: 16-bit results
    lose little."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def silu(score, FAST: tl.constexpr):
    """Return x sigmoid(x) where `score` is x / 2, which suits the form with tanh."""
    if FAST:
        return score * tanh(score) + score
    else:
        return 2.0 * score * tl.sigmoid(2.0 * score)


@triton.jit
def silu_and_slope(score, FAST: tl.constexpr):
    """Return `silu` and twice its slope, u (1 + x (2 - u) / 2) with u = 2 sigmoid(x)."""
    if FAST:
        doubled = tanh(score) + 1.0
    else:
        doubled = 2.0 * tl.sigmoid(2.0 * score)
    weight = score * doubled
    return weight, doubled + weight * (2.0 - doubled)
