"""Forward kernel: one tile of rows of one head, over the blocks of keys that it sees.

    out[i] = sum_j silu(alpha <q_i, k_j> + bias[i, j]) v_j / scale_len

Scores and sums are float32; the weights are rounded to the dtype of v for the second product.
"""

import triton
import triton.language as tl

from recsys.ops.hstu_attention.bias.kernels import add_bias, load_times
from recsys.ops.hstu_attention.bias.packed import begin, packed_scores, records_of
from recsys.ops.hstu_attention.mask_forms import visible
from recsys.ops.hstu_attention.triton.tile import (
    UNSEEN,
    VARYING,
    head_of,
    load_block,
    relative_position,
    silu,
    store_block,
)
from recsys.ops.hstu_attention.work_list.item import (
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
