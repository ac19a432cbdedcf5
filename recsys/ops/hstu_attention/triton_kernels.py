"""Triton kernels of `hstu_attention`, and the parts that they share with others.

`forward_kernel` computes one tile of rows of one head, over the blocks of keys that it sees:

    out[i] = sum_j silu(alpha <q_i, k_j> + bias[i, j]) v_j / scale_len

Scores and sums are float32; the weights are rounded to the dtype of v for the second product. In backward,
with S = alpha Q K^T + bias, sigma its sigmoid and dO the gradient of the output:

    dV = silu(S)^T dO / scale_len
    dS = (dO V^T) * sigma (1 + S (1 - sigma)) / scale_len        zero for hidden pairs
    dK = alpha dS^T Q,    dQ = alpha dS K,    and each entry of a bias table gets the sum of its dS

`keys_kernel` owns a tile of keys and sums dK and dV over rows; `rows_kernel` owns a tile of rows and sums dQ
over keys. Both recompute S: each sum has one owner and one order. That makes seven products instead of five,
but no program adds to what another has written: summing dQ with atomics in the first kernel took 4 to 57 %
longer on an H200. Where both sums of `keys_kernel` do not fit into the registers, it runs twice, once for
each sum. `bias.table_kernels` computes the gradients of the tables; `keys_kernel` can also do so, with the
inline assembly of `bias.ptx` and in no fixed order. On Hopper, `bias.hopper_kernel` computes everything at
once where it can.

In `keys_kernel` scores are computed as K Q^T: Triton mistranslates the product of a transposed accumulator on
Hopper (seen up to 3.7). Factors common to a whole sum are applied at its end.

The parts behind the kernels' names are inlined. Scores come in two orientations, [rows, keys] where a program
owns rows and [keys, rows] where it owns keys, so positions are passed ready to broadcast: `i` for rows, `j`
for keys.

`mask_forms` explains the tuples `rule` and `RULE`. FAST allows inline PTX and a sigmoid accurate to 11 bits,
for 16-bit operands; without it the instructions are portable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys.ops.hstu_attention.bias.kernels import add_bias, load_times
from recsys.ops.hstu_attention.bias.packed import add_to_tables, begin, finish_sums, packed_scores, records_of
from recsys.ops.hstu_attention.mask_forms import visible
from recsys.ops.hstu_attention.work_list.kernels import (
    NUM_COLUMNS,
    UNMASKED_COUNT,
    UNMASKED_START,
    block_at,
    load_runs,
    load_tile,
    masked_block,
    num_blocks,
    num_masked,
)
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


@triton.jit
def _add_block(
    total, q_block, block, masked, keys, sample, rows, rule, tables,
    SIZES: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Return `total` [BLOCK_M, BLOCK_V] plus the contribution of one block of keys; `masked`: apply the mask.

    INSIDE: all keys are known to lie inside the sample.
    """
    k, v, times, length, before = keys
    history_end, alpha = sample
    i, relative_i, row_times, i_first = rows
    D: tl.constexpr = SIZES[0]
    V: tl.constexpr = SIZES[1]
    BLOCK_N: tl.constexpr = SIZES[3]
    BLOCK_D: tl.constexpr = SIZES[4]
    BLOCK_V: tl.constexpr = SIZES[5]
    BIASED: tl.constexpr = MODE[0]
    first = block * BLOCK_N
    at = first + tl.arange(0, BLOCK_N)[None, :]
    j = at + before
    k_block = load_block(k, first, length, D, BLOCK_N, BLOCK_D, INSIDE, MODE[3])
    score = tl.dot(q_block, tl.trans(k_block), input_precision=MODE[2])
    if MODE[4] != "":
        score = packed_scores(
            score, alpha, row_times, i_first, times, first, (history_end, rule[3]), tables,
            MODE[4], MODE[5],
        )  # fmt: skip
    else:
        score = score * alpha
    if BIASED and MODE[4] == "":
        place = -j if INSIDE else -relative_position(j, history_end, rule[3], RULE)  # INSIDE: no target keys
        key_times = load_times(times, at, first, length)
        score = add_bias(
            score, row_times, key_times, row_times, key_times, relative_i, place, tables, MODE[1]
        )
    if masked:
        score = tl.where(visible(i, j, history_end, rule, RULE), score, UNSEEN)
    weight = silu(score, MODE[1])
    v_block = load_block(v, first, length, V, BLOCK_N, BLOCK_V, INSIDE, MODE[3])
    return tl.dot(weight.to(v_block.dtype), v_block, total, input_precision=MODE[2])


@triton.jit
def add_blocks(
    total, q_block, item, runs, keys, sample, rows, rule, tables,
    SIZES: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Return `total` [BLOCK_M, BLOCK_V] plus the contribution of all blocks of keys that `item` lists.

    runs    the item's runs of blocks, see `load_runs`
    keys    k, v (see `head_of`), times, length; number of the sample's tokens before these keys
    sample  history_end, half of alpha
    rows    positions in the sample and in the bias, times of the tokens after them
    """
    if MODE[0] and MODE[4] == "":
        for place in range(num_masked(runs)):
            block = masked_block(place, runs)
            total = _add_block(
                total, q_block, block, True, keys, sample, rows, rule, tables, SIZES, RULE, MODE, False
            )
        unmasked = tl.load(item + UNMASKED_START).to(tl.int32)
        for block in range(unmasked, unmasked + tl.load(item + UNMASKED_COUNT).to(tl.int32)):
            total = _add_block(
                total, q_block, block, False, keys, sample, rows, rule, tables, SIZES, RULE, MODE, True
            )
    else:  # a single loop fills and drains its pipeline only once
        for place in range(num_blocks(runs)):
            block, masked = block_at(place, runs)
            total = _add_block(
                total, q_block, block, masked, keys, sample, rows, rule, tables, SIZES, RULE, MODE, False
            )
    return total


@triton.jit(do_not_specialize=[*VARYING])
def forward_kernel(
    q, k, v, out, items, num_items, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    BIAS_TEXT: tl.constexpr, BIAS_CONSTRAINTS: tl.constexpr, BEGIN_TEXT: tl.constexpr,
):  # fmt: skip
    """Write out [T, H, V], contiguous. One program runs per item and head, heads fastest.

    DESCRIBED: q, k and v are descriptors, see `runtime.descriptors`.
    """
    SIZES: tl.constexpr = (D, V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    MODE: tl.constexpr = (BIASED, FAST, PRECISION, DESCRIBED, BIAS_TEXT, BIAS_CONSTRAINTS)
    PACKED: tl.constexpr = BIAS_TEXT != ""
    rule = (num_contextual, window, prefix, group_size)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    inverse_scale = tl.full([1, 1], inverse_scale, tl.float32)
    distances = position_table + head * position_stride + reach
    if PACKED:
        lookup = time_table + head * time_stride
        tables = (distances, lookup, records_of(float_edges, tl.program_id(0) // num_heads))
        begin(lookup, BEGIN_TEXT)
    else:
        tables = (distances, (time_table + head * time_stride, time_edges, float_edges, num_buckets))
    own = tl.program_id(0) // num_heads
    for number in range(own, own + 1):
        item = items + tl.cast(number, tl.int64) * NUM_COLUMNS
        start, length, history_end, first = load_tile(item)
        runs = load_runs(item)  # before the wait for q
        q_head = head_of(q, start, length, head, (stride_qt, stride_qh), DESCRIBED)
        k_head = head_of(k, start, length, head, (stride_kt, stride_kh), DESCRIBED)
        v_head = head_of(v, start, length, head, (stride_vt, stride_vh), DESCRIBED)
        q_block = load_block(q_head, first, length, D, BLOCK_M, BLOCK_D, False, DESCRIBED)
        i = first + tl.arange(0, BLOCK_M)[:, None]
        if PACKED:
            row_times = (length, next_timestamps, ahead, time_edges)
            key_times = (length, timestamps, behind, start)
            keys = (k_head, v_head, key_times, length, 0)
        else:
            keys = (k_head, v_head, (timestamps + start, behind + start, key_bounds + start * 2), length, 0)
            row_times = (next_timestamps + start, ahead + start, row_bounds + start * 2)
            if BIASED:
                row_times = load_times(row_times, i, first, length)
        rows = (i, relative_position(i, history_end, group_size, RULE), row_times, first)
        total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        sample = (history_end, alpha)
        total = add_blocks(total, q_block, item, runs, keys, sample, rows, rule, tables, SIZES, RULE, MODE)
        out_head = out + (start * num_heads + head) * V
        store_block(out_head, first, length, num_heads * V, total * inverse_scale, V, BLOCK_M, BLOCK_V)


@triton.jit
def _add_rows(
    sums, keys, block, masked, sample, columns, rule, tables,
    SIZES: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Return `sums`, dK and dV of a tile of keys, plus the contribution of one block of rows; `masked`: apply
    the mask."""
    grad_k, grad_v = sums
    k_tile, v_tile = keys
    q, grad_out, times, length, history_end, alpha = sample
    j, relative_j, key_times, own = columns
    D: tl.constexpr = SIZES[0]
    V: tl.constexpr = SIZES[1]
    BLOCK_M: tl.constexpr = SIZES[2]
    BLOCK_D: tl.constexpr = SIZES[4]
    BLOCK_V: tl.constexpr = SIZES[5]
    BIASED: tl.constexpr = MODE[0]
    PRECISION: tl.constexpr = MODE[2]
    GRAD_K: tl.constexpr = MODE[3]
    GRAD_V: tl.constexpr = MODE[4]
    first = block * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)[None, :]
    q_block = load_block(q, first, length, D, BLOCK_M, BLOCK_D, False, MODE[7])
    score = tl.dot(k_tile, tl.trans(q_block), input_precision=PRECISION)
    if MODE[5] != "":
        score = packed_scores(
            score, alpha, key_times, own, times, first, (history_end, rule[3]), tables,
            MODE[5], MODE[6],
        )  # fmt: skip
    else:
        score = score * alpha
    if BIASED and MODE[5] == "":
        place = relative_position(i, history_end, rule[3], RULE)
        row_times = load_times(times, i, first, length)
        score = add_bias(
            score, row_times, key_times, key_times, row_times, -relative_j, place, tables, MODE[1]
        )
    if masked:
        score = tl.where(visible(i, j, history_end, rule, RULE), score, UNSEEN)
    weight, slope = silu_and_slope(score, MODE[1])
    grad_block = load_block(grad_out, first, length, V, BLOCK_M, BLOCK_V, False, MODE[7])
    if GRAD_K:
        grad_weight = tl.dot(v_tile, tl.trans(grad_block), input_precision=PRECISION)
        grad_score = grad_weight * slope
    if GRAD_V:
        grad_v = tl.dot(weight.to(grad_block.dtype), grad_block, grad_v, input_precision=PRECISION)
    if GRAD_K:
        grad_k = tl.dot(grad_score.to(q_block.dtype), q_block, grad_k, input_precision=PRECISION)
    if MODE[8] != "":
        add_to_tables(
            grad_score, key_times, own, times, first, (history_end, rule[3]), tables,
            tables[3], MODE[8], MODE[9],
        )  # fmt: skip
    return grad_k, grad_v


@triton.jit(do_not_specialize=[*VARYING, "copies"])
def keys_kernel(
    q, k, v, grad_out, grad_k, grad_v, items, num_items, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    position_sums, time_sums, copies,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    GRAD_K: tl.constexpr, GRAD_V: tl.constexpr,
    BIAS_TEXT: tl.constexpr, BIAS_CONSTRAINTS: tl.constexpr, BEGIN_TEXT: tl.constexpr,
    TABLES_TEXT: tl.constexpr, TABLES_CONSTRAINTS: tl.constexpr, FINISH_TEXT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Write grad_k [T, H, D] if GRAD_K and grad_v [T, H, V] if GRAD_V, both contiguous.

    One program runs per item and head, heads fastest. With TABLES_TEXT it also adds the gradients of the
    tables, scaled as in `diagonals_kernel` but in no fixed order, to zero-initialized position_sums, float32
    [copies, H, 2 * reach + 1], and time_sums, float32 [copies, H, num_buckets].
    """
    SIZES: tl.constexpr = (D, V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    MODE: tl.constexpr = (
        BIASED, FAST, PRECISION, GRAD_K, GRAD_V, BIAS_TEXT, BIAS_CONSTRAINTS, DESCRIBED,
        TABLES_TEXT, TABLES_CONSTRAINTS,
    )  # fmt: skip
    PACKED: tl.constexpr = BIAS_TEXT != ""
    rule = (num_contextual, window, prefix, group_size)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    inverse_scale = tl.full([1, 1], inverse_scale, tl.float32)
    distances = position_table + head * position_stride + reach
    own = tl.program_id(0) // num_heads
    part = (own % copies) * num_heads + head
    if PACKED:
        lookup = time_table + head * time_stride
        sums = position_sums + part * (2 * reach + 1) + reach
        tables = (distances, lookup, records_of(float_edges, own), sums)
        begin(lookup, BEGIN_TEXT)
    else:
        tables = (distances, (time_table + head * time_stride, time_edges, float_edges, num_buckets))
    for number in range(own, own + 1):
        item = items + tl.cast(number, tl.int64) * NUM_COLUMNS
        start, length, history_end, first = load_tile(item)
        runs = load_runs(item)
        k_head = head_of(k, start, length, head, (stride_kt, stride_kh), DESCRIBED)
        v_head = head_of(v, start, length, head, (stride_vt, stride_vh), DESCRIBED)
        k_tile = load_block(k_head, first, length, D, BLOCK_N, BLOCK_D, False, DESCRIBED)
        v_tile = load_block(v_head, first, length, V, BLOCK_N, BLOCK_V, False, DESCRIBED)
        q_head = head_of(q, start, length, head, (stride_qt, stride_qh), DESCRIBED)
        o_head = head_of(grad_out, start, length, head, (stride_ot, stride_oh), DESCRIBED)
        token = (start * num_heads + head).to(tl.int64)
        j = first + tl.arange(0, BLOCK_N)[:, None]
        if PACKED:
            row_times = (length, next_timestamps, ahead, start)
            key_times = (length, timestamps, behind, time_edges)
        else:
            row_times = (next_timestamps + start, ahead + start, row_bounds + start * 2)
            key_times = (timestamps + start, behind + start, key_bounds + start * 2)
            if BIASED:
                key_times = load_times(key_times, j, first, length)
        sample = (q_head, o_head, row_times, length, history_end, alpha)
        columns = (j, relative_position(j, history_end, group_size, RULE), key_times, first)
        keys = (k_tile, v_tile)
        sum_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        sum_v = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        if BIASED and not PACKED:
            for place in range(num_masked(runs)):
                block = masked_block(place, runs)
                sum_k, sum_v = _add_rows(
                    (sum_k, sum_v), keys, block, True, sample, columns, rule, tables, SIZES, RULE, MODE
                )
            unmasked = tl.load(item + UNMASKED_START).to(tl.int32)
            for block in range(unmasked, unmasked + tl.load(item + UNMASKED_COUNT).to(tl.int32)):
                sum_k, sum_v = _add_rows(
                    (sum_k, sum_v), keys, block, False, sample, columns, rule, tables, SIZES, RULE, MODE
                )
        else:  # a single loop fills and drains its pipeline only once
            for place in range(num_blocks(runs)):
                block, masked = block_at(place, runs)
                sum_k, sum_v = _add_rows(
                    (sum_k, sum_v), keys, block, masked, sample, columns, rule, tables, SIZES, RULE, MODE
                )
        if GRAD_K:
            sum_k = sum_k * (alpha * inverse_scale)
            store_block(grad_k + token * D, first, length, num_heads * D, sum_k, D, BLOCK_N, BLOCK_D)
        if GRAD_V:
            sum_v = sum_v * inverse_scale
            store_block(grad_v + token * V, first, length, num_heads * V, sum_v, V, BLOCK_N, BLOCK_V)
    if FINISH_TEXT != "":
        finish_sums(time_sums + part * num_buckets, num_buckets, FINISH_TEXT)


@triton.jit
def _add_keys(
    grad_q, tiles, block, masked, sample, rows, rule, tables,
    SIZES: tl.constexpr, RULE: tl.constexpr, MODE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Return `grad_q`, dQ of a tile of rows, plus the contribution of one block of keys; `masked`: apply the
    mask."""
    q_tile, grad_tile = tiles
    k, v, times, length, history_end, alpha = sample
    i, relative_i, row_times, own = rows
    D: tl.constexpr = SIZES[0]
    V: tl.constexpr = SIZES[1]
    BLOCK_N: tl.constexpr = SIZES[3]
    BLOCK_D: tl.constexpr = SIZES[4]
    BLOCK_V: tl.constexpr = SIZES[5]
    BIASED: tl.constexpr = MODE[0]
    PRECISION: tl.constexpr = MODE[2]
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)[None, :]
    k_block = load_block(k, first, length, D, BLOCK_N, BLOCK_D, INSIDE, MODE[5])
    score = tl.dot(q_tile, tl.trans(k_block), input_precision=PRECISION)
    if MODE[3] != "":
        score = packed_scores(
            score, alpha, row_times, own, times, first, (history_end, rule[3]), tables,
            MODE[3], MODE[4],
        )  # fmt: skip
    else:
        score = score * alpha
    if BIASED and MODE[3] == "":
        place = -j if INSIDE else -relative_position(j, history_end, rule[3], RULE)  # INSIDE: no target keys
        key_times = load_times(times, j, first, length)
        score = add_bias(
            score, row_times, key_times, row_times, key_times, relative_i, place, tables, MODE[1]
        )
    if masked:
        score = tl.where(visible(i, j, history_end, rule, RULE), score, UNSEEN)
    _, slope = silu_and_slope(score, MODE[1])
    v_block = load_block(v, first, length, V, BLOCK_N, BLOCK_V, INSIDE, MODE[5])
    grad_score = tl.dot(grad_tile, tl.trans(v_block), input_precision=PRECISION) * slope
    grad_q = tl.dot(grad_score.to(k_block.dtype), k_block, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit(do_not_specialize=[*VARYING])
def rows_kernel(
    q, k, v, grad_out, grad_q, items, num_items, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BIAS_TEXT: tl.constexpr, BIAS_CONSTRAINTS: tl.constexpr, BEGIN_TEXT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Write grad_q [T, H, D], contiguous. One program runs per item and head, heads fastest."""
    SIZES: tl.constexpr = (D, V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V)
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    MODE: tl.constexpr = (BIASED, FAST, PRECISION, BIAS_TEXT, BIAS_CONSTRAINTS, DESCRIBED)
    PACKED: tl.constexpr = BIAS_TEXT != ""
    rule = (num_contextual, window, prefix, group_size)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    inverse_scale = tl.full([1, 1], inverse_scale, tl.float32)
    distances = position_table + head * position_stride + reach
    if PACKED:
        lookup = time_table + head * time_stride
        tables = (distances, lookup, records_of(float_edges, tl.program_id(0) // num_heads))
        begin(lookup, BEGIN_TEXT)
    else:
        tables = (distances, (time_table + head * time_stride, time_edges, float_edges, num_buckets))
    own = tl.program_id(0) // num_heads
    for number in range(own, own + 1):
        item = items + tl.cast(number, tl.int64) * NUM_COLUMNS
        start, length, history_end, first = load_tile(item)
        runs = load_runs(item)
        q_head = head_of(q, start, length, head, (stride_qt, stride_qh), DESCRIBED)
        o_head = head_of(grad_out, start, length, head, (stride_ot, stride_oh), DESCRIBED)
        q_tile = load_block(q_head, first, length, D, BLOCK_M, BLOCK_D, False, DESCRIBED)
        grad_tile = load_block(o_head, first, length, V, BLOCK_M, BLOCK_V, False, DESCRIBED)
        k_head = head_of(k, start, length, head, (stride_kt, stride_kh), DESCRIBED)
        v_head = head_of(v, start, length, head, (stride_vt, stride_vh), DESCRIBED)
        i = first + tl.arange(0, BLOCK_M)[:, None]
        if PACKED:
            row_times = (length, next_timestamps, ahead, time_edges)
            key_times = (length, timestamps, behind, start)
        else:
            row_times = (next_timestamps + start, ahead + start, row_bounds + start * 2)
            key_times = (timestamps + start, behind + start, key_bounds + start * 2)
            if BIASED:
                row_times = load_times(row_times, i, first, length)
        sample = (k_head, v_head, key_times, length, history_end, alpha)
        rows = (i, relative_position(i, history_end, group_size, RULE), row_times, first)
        tiles = (q_tile, grad_tile)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if BIASED and not PACKED:
            for place in range(num_masked(runs)):
                block = masked_block(place, runs)
                total = _add_keys(
                    total, tiles, block, True, sample, rows, rule, tables, SIZES, RULE, MODE, False
                )
            unmasked = tl.load(item + UNMASKED_START).to(tl.int32)
            for block in range(unmasked, unmasked + tl.load(item + UNMASKED_COUNT).to(tl.int32)):
                total = _add_keys(
                    total, tiles, block, False, sample, rows, rule, tables, SIZES, RULE, MODE, True
                )
        else:  # a single loop fills and drains its pipeline only once
            for place in range(num_blocks(runs)):
                block, masked = block_at(place, runs)
                total = _add_keys(
                    total, tiles, block, masked, sample, rows, rule, tables, SIZES, RULE, MODE, False
                )
        head_q = grad_q + (start * num_heads + head) * D
        total = total * (alpha * inverse_scale)
        store_block(head_q, first, length, num_heads * D, total, D, BLOCK_M, BLOCK_D)
