"""Compute the gradients of the bias tables: sums of the scores' gradients, by distance and by time bucket.

Blocks of scores that lie on one diagonal of the score matrix have their distances at the same places. So
`diagonals_kernel` visits the blocks of all samples diagonal by diagonal, adds whole blocks elementwise, and
sums by distance once at the end of a diagonal. Rows that are targets have other distances, and contextual
rows may see keys behind their tile: tiles with such rows are left to `others_kernel`, which sums by distance
block by block.

For each bucket that occurs in a block, the sums by time bucket add up what lies past the bucket's edge, just
as `kernels` computes the bias. Each thread adds to numbers of its own in the order of its work, so the sums
are bitwise repeatable.

`diagonal_work` lists the blocks in plain PyTorch on the layout's device: nothing waits for the host, and a
compiler can trace it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.hstu_attention.bias.kernels import add_bias, block_buckets, is_long_past, is_past, load_times
from recsys.ops.hstu_attention.mask_forms import visible
from recsys.ops.hstu_attention.triton_kernels import (
    UNSEEN,
    VARYING,
    head_of,
    load_block,
    relative_position,
    silu_and_slope,
)
from recsys.ops.hstu_attention.work_list.kernels import (
    NUM_COLUMNS,
    block_at,
    load_runs,
    load_tile,
    num_blocks,
)
from recsys.ops.hstu_attention.work_list.reference import tiles_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask

NEAR_TILES = 4
"""Blocks less than this many tiles behind the main diagonal count as near it."""


class DiagonalWork(NamedTuple):
    """Blocks of scores in the order of their diagonals, those next to the main diagonal first.

    In the blocks of diagonal `d` the first row is `(d + 1) * block - tile` tokens behind the first key.
    """

    items: Tensor  # int64 [n, 4], leading columns of `row_work` items: history only, last tiles first
    ends: Tensor  # int64 [diagonals], end of each diagonal's block numbers, counted across diagonals
    shifts: Tensor  # int64 [diagonals], added to a block's number gives the item with its rows
    first_diagonal: Tensor  # int64 [workers], diagonal of each worker's first block past the near diagonals
    num_near: int  # number of near diagonals, capped by their total; all workers share each

    # The far diagonals are divided among the workers as one sequence, so that a worker visits few of them.
    # Near the main diagonal a block has ten times as many time buckets and is more work.


def diagonal_work(
    mask: AttentionMask, layout: SequenceLayout, tile: int, block: int, workers: int
) -> DiagonalWork:
    """List the blocks of `tile` rows and `block` keys in which some row sees some key; `tile` is a multiple
    of `block`.

    Includes only rows whose position in the bias equals that in the sample and that see nothing behind their
    tile: tiles with targets among their rows, or with contextual rows that see later keys, are left out.
    """
    return layout.memo(
        ("diagonal_work", mask, tile, block, workers),
        lambda: _diagonal_work(mask, layout, tile, block, workers),
    )


def _diagonal_work(
    mask: AttentionMask, layout: SequenceLayout, tile: int, block: int, workers: int
) -> DiagonalWork:
    tiles = tiles_of(layout, tile)
    has_targets = (tiles.history_end < tiles.length) & (tiles.first + tile > tiles.history_end)
    sees_later = tiles.first < layout.num_contextual
    if not mask.contextual_reads_history:  # its rows see contextual keys only, maybe all within the tile
        sees_later = tiles.first + tile < layout.num_contextual
    kept = (tiles.length > 0) & ~has_targets & ~sees_later
    first = torch.where(kept, tiles.first, -tile)  # left out of every diagonal
    order = torch.argsort(first, descending=True, stable=True)
    ascending = first.index_select(0, order).flip(0)

    def num_from(token: Tensor) -> Tensor:
        """Return int64: the number of tiles that begin at `token` or later."""
        return first.shape[0] - torch.searchsorted(ascending, token)

    num_diagonals = tile // block * ((layout.max_len + tile - 1) // tile)
    distance = (torch.arange(num_diagonals, device=layout.device) + 1) * block - tile
    skipped = torch.zeros_like(distance)
    if mask.window is not None:  # past the window only pinned keys are visible
        always = (layout.num_contextual + mask.prefix + block - 1) // block
        outside = distance - block >= mask.window - 1
        skipped = torch.where(outside, num_from(distance + always * block), skipped)
    counts = (num_from(distance) - skipped).clamp(min=0)
    ends = counts.cumsum(0)
    num_near = NEAR_TILES * tile // block
    is_near = torch.arange(num_diagonals, device=layout.device) < num_near
    near = torch.where(is_near, counts, 0).sum(0, keepdim=True)
    shares = near + (ends[-1:] - near) * torch.arange(workers, device=layout.device) // workers
    return DiagonalWork(
        items=torch.stack(tiles[:4], dim=1).index_select(0, order),
        ends=ends,
        shifts=skipped - (ends - counts),
        first_diagonal=torch.searchsorted(ends, shares, right=True),
        num_near=num_near,
    )


DIAGONAL_COLUMNS = tl.constexpr(4)
"""Columns of a tile in `diagonals_kernel`: the leading columns of an item."""


@triton.jit
def _add_by_distance(partial, grad_score, reach, first_key, lines, BLOCK_N: tl.constexpr):
    """Add the scores' gradients [rows, keys] to the entries of their distances `reach - key`.

    Row `i` of the block is rotated until keys of equal distance modulo BLOCK_N stand in one column; a line of
    BLOCK_N distances is then a sum over rows. `partial` has a line for negative distances, then the table's
    lines, then one for all distances past them; `lines` is the number of the last line.
    """
    lane = tl.arange(0, BLOCK_N)
    offset = reach - first_key  # [rows, 1]: distance to the block's first key
    turned = (offset - lane[None, :]) & (BLOCK_N - 1)
    values = tl.gather(grad_score, turned, 1)
    line = (offset - turned - lane[None, :]) // BLOCK_N  # exact
    line = tl.minimum(tl.maximum(line, -1), lines)
    tl.debug_barrier()  # makes earlier stores of other threads of this program visible to the loads below
    for number in range(tl.min(line), tl.max(line) + 1):
        part = tl.sum(tl.where(line == number, values, 0.0), 0)
        pointer = partial + (number + 1) * BLOCK_N + lane
        tl.store(pointer, tl.load(pointer) + part)


@triton.jit
def _sum_in_threads(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum [ROWS, COLUMNS] to [ROWS * 2], the share of each thread in the result of a matrix instruction."""
    parts = tl.reshape(values, [ROWS // 16, 2, 8, COLUMNS // 8, 4, 2])
    return tl.reshape(tl.sum(tl.sum(tl.sum(parts, 5), 3), 1), [ROWS * 2])


@triton.jit
def _add_to(pointer, values, FAST: tl.constexpr):
    """Add to memory that no other program adds to, without waiting. FAST: each value is in one thread
    only."""
    if FAST:
        tl.inline_asm_elementwise(
            "red.relaxed.gpu.global.add.f32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,f",
            [pointer.to(tl.int64), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_add(pointer, values, sem="relaxed")


@triton.jit
def _add_by_bucket(
    partial, grad_score, rows, keys, tables, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FAST: tl.constexpr
):
    """Add the scores' gradients [rows, keys] to `partial` [buckets, ROWS * 2]."""
    _, time_edges, _, num_buckets = tables
    least, exact, _, low, high = block_buckets(rows, keys, time_edges, num_buckets)
    pointer = partial + tl.arange(0, ROWS * 2)
    rest = _sum_in_threads(grad_score, ROWS, COLUMNS)
    for bucket in range(low, high + 1):
        past = tl.zeros([ROWS * 2], tl.float32)
        if bucket < high:
            edge = tl.load(time_edges + bucket + 1)
            if exact:
                past = _sum_in_threads(grad_score * is_past(edge, least, rows, keys, FAST), ROWS, COLUMNS)
            else:
                past = _sum_in_threads(grad_score * is_long_past(edge, rows, keys), ROWS, COLUMNS)
        _add_to(pointer + bucket * (ROWS * 2), rest - past, FAST)
        rest = past


@triton.jit
def _heads(tensors, start, length, head, strides):
    """Return one head of q, k, v and grad_out for a sample."""
    q, k, v, grad_out = tensors
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh = strides
    return (
        head_of(q, start, length, head, (stride_qt, stride_qh)),
        head_of(k, start, length, head, (stride_kt, stride_kh)),
        head_of(v, start, length, head, (stride_vt, stride_vh)),
        head_of(grad_out, start, length, head, (stride_ot, stride_oh)),
    )


@triton.jit(do_not_specialize=[*VARYING, "num_near", "num_diagonals", "lines"])
def diagonals_kernel(
    q, k, v, grad_out, items, ends, shifts, first_diagonal, num_near, num_diagonals, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    position_partial, time_partial, lines,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Compute the tables' gradients from history rows, a partial sum per program, times 2 scale_len.

    items, ends, shifts, first_diagonal, num_near: see `diagonal_work`.
    position_partial: float32 [programs, (lines + 2) * BLOCK_N], zeros on entry: see `_add_by_distance`.
    time_partial: float32 [programs, BUCKETS, BLOCK_M * 2], zeros on entry.
    """
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    program = tl.program_id(0).to(tl.int64)
    head = program % num_heads
    worker = program // num_heads
    num_workers = tl.num_programs(0) // num_heads
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    tables = (time_table + head * time_stride, time_edges, float_edges, num_buckets)
    distances = position_table + head * position_stride + reach
    by_distance = position_partial + program * ((lines + 2) * BLOCK_N)
    by_bucket = time_partial + program * (BUCKETS * BLOCK_M * 2)
    strides = (stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh)
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    num_near = tl.minimum(num_near, num_diagonals)
    near = tl.load(ends + num_near - 1)
    rest = tl.load(ends + num_diagonals - 1) - near
    behind_near = (near + rest * worker // num_workers).to(tl.int32)
    last = (near + rest * (worker + 1) // num_workers).to(tl.int32)
    number = tl.zeros([], tl.int32)
    while (number < num_near) | (behind_near < last):
        stop = tl.load(ends + number)
        if number < num_near:
            begin = tl.load(ends + number - 1, mask=number > 0, other=0)
            place = (begin + (stop - begin) * worker // num_workers).to(tl.int32)
            end = (begin + (stop - begin) * (worker + 1) // num_workers).to(tl.int32)
        else:
            place = behind_near
            end = tl.minimum(last, stop.to(tl.int32))
            behind_near = tl.maximum(end, place)
        if place < end:
            shift = tl.load(shifts + number)
            distance = (number + 1) * BLOCK_N - BLOCK_M  # from each block's first key to its first row
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for at in range(place, end):
                start, length, history_end, first = load_tile(items + (at + shift) * DIAGONAL_COLUMNS)
                first_key = first - distance
                q_head, k_head, v_head, o_head = _heads((q, k, v, grad_out), start, length, head, strides)
                i = first + row
                j = first_key + column
                rows = load_times(
                    (next_timestamps + start, ahead + start, row_bounds + start * 2), i, first, length
                )
                keys = load_times(
                    (timestamps + start, behind + start, key_bounds + start * 2), j, first_key, length
                )
                q_tile = load_block(q_head, first, length, D, BLOCK_M, BLOCK_D, False)
                k_tile = load_block(k_head, first_key, length, D, BLOCK_N, BLOCK_D, False)
                score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * alpha
                score = add_bias(
                    score, rows, keys, rows, keys, distance + row, -column, (distances, tables), FAST
                )
                if WINDOWED | (distance < BLOCK_N) | (first < num_contextual):
                    score = tl.where(visible(i, j, history_end, rule, RULE), score, UNSEEN)
                _, slope = silu_and_slope(score, FAST)
                grad_tile = load_block(o_head, first, length, V, BLOCK_M, BLOCK_V, False)
                v_tile = load_block(v_head, first_key, length, V, BLOCK_N, BLOCK_V, False)
                grad_score = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION) * slope
                sums += grad_score
                _add_by_bucket(by_bucket, grad_score, rows, keys, tables, BLOCK_M, BLOCK_N, FAST)
            _add_by_distance(by_distance, sums, distance + row, 0, lines, BLOCK_N)
        number += 1
        if number == num_near:
            number = tl.load(first_diagonal + worker).to(tl.int32)


@triton.jit(do_not_specialize=[*VARYING, "lines"])
def others_kernel(
    q, k, v, grad_out, items, num_items, num_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, time_edges, float_edges,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    position_partial, time_partial, lines,
    D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    BIASED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the tiles of rows (of `row_work`) that `diagonals_kernel` leaves out."""
    RULE: tl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    program = tl.program_id(0).to(tl.int64)
    head = program % num_heads
    alpha = tl.full([1, 1], 0.5 * alpha, tl.float32)
    tables = (time_table + head * time_stride, time_edges, float_edges, num_buckets)
    distances = position_table + head * position_stride + reach
    by_distance = position_partial + program * ((lines + 2) * BLOCK_N)
    by_bucket = time_partial + program * (BUCKETS * BLOCK_M * 2)
    strides = (stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh)
    for number in range(tl.program_id(0) // num_heads, num_items, tl.num_programs(0) // num_heads):
        item = items + tl.cast(number, tl.int64) * NUM_COLUMNS
        start, length, history_end, first = load_tile(item)
        has_others = (history_end < length) & (first + BLOCK_M > history_end)
        if CONTEXTUAL_READS:
            has_others = has_others | (first < num_contextual)
        else:
            has_others = has_others | (first + BLOCK_M < num_contextual)
        if has_others:
            runs = load_runs(item)
            q_head, k_head, v_head, o_head = _heads((q, k, v, grad_out), start, length, head, strides)
            i = first + tl.arange(0, BLOCK_M)[:, None]
            relative_i = relative_position(tl.minimum(i, length - 1), history_end, group_size, RULE)
            rows = load_times(
                (next_timestamps + start, ahead + start, row_bounds + start * 2), i, first, length
            )
            q_tile = load_block(q_head, first, length, D, BLOCK_M, BLOCK_D, False)
            grad_tile = load_block(o_head, first, length, V, BLOCK_M, BLOCK_V, False)
            for place in range(num_blocks(runs)):
                block, _ = block_at(place, runs)
                first_key = block * BLOCK_N
                j = first_key + tl.arange(0, BLOCK_N)[None, :]
                relative_j = relative_position(j, history_end, group_size, RULE)
                keys = load_times(
                    (timestamps + start, behind + start, key_bounds + start * 2), j, first_key, length
                )
                k_tile = load_block(k_head, first_key, length, D, BLOCK_N, BLOCK_D, False)
                score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * alpha
                score = add_bias(
                    score, rows, keys, rows, keys, relative_i, -relative_j, (distances, tables), FAST
                )
                score = tl.where(visible(i, j, history_end, rule, RULE), score, UNSEEN)
                _, slope = silu_and_slope(score, FAST)
                v_tile = load_block(v_head, first_key, length, V, BLOCK_N, BLOCK_V, False)
                grad_score = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION) * slope
                _add_by_bucket(by_bucket, grad_score, rows, keys, tables, BLOCK_M, BLOCK_N, FAST)
                is_target = j >= history_end
                from_history = tl.where(is_target, 0.0, grad_score)
                _add_by_distance(by_distance, from_history, relative_i, first_key, lines, BLOCK_N)
                if first_key + BLOCK_N > history_end:  # within a target group distances count tokens
                    from_targets = tl.where(is_target, grad_score, 0.0)
                    inside = tl.minimum(i, length - 1)
                    _add_by_distance(by_distance, from_targets, inside, first_key, lines, BLOCK_N)
