"""Online log-sum-exp over tiles of scores, and the products of their gradient with either operand.

Scores are raw inside of the kernels, hidden weight^T + bias, and are scaled inside of the exponential.
Products are summed in float32; in backward the gradient of the scores is complete, the target's share in it,
before it is rounded for the second product. i counts rows of hidden, j rows of the weight (candidates).
"""

import math

import triton
import triton.language as tl

# What a kernel reads of module scope must be a constexpr.
LOG2E = tl.constexpr(math.log2(math.e))
NONE = tl.constexpr(float("-inf"))


@triton.jit
def _load_rows(matrix, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(row), BLOCK_D], zero behind column D."""
    column = tl.arange(0, BLOCK_D)
    pointers = matrix + row.to(tl.int64)[:, None] * stride + column[None, :]
    if D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=column[None, :] < D, other=0.0)


@triton.jit
def _of_rows(i, maximum, factor, of_target, target, target_ids, num_rows, HAS_TARGET, HAS_IDS):
    """What backward knows of rows: maximum in powers of 2, factor, the target's share, target, its id.

    i [BLOCK]; rows behind the last have no gradient.
    """
    at = tl.minimum(i, num_rows - 1)
    top = tl.load(maximum + at) * LOG2E
    slope = tl.where(i < num_rows, tl.load(factor + at), 0.0)
    share, place, wanted = slope, at, at
    if HAS_TARGET:
        share = tl.where(i < num_rows, tl.load(of_target + at), 0.0)
        place = tl.load(target + at).to(tl.int32)
    if HAS_IDS:
        wanted = tl.load(target_ids + at)
    return top, slope, share, place, wanted


@triton.jit
def _of_candidates(j, bias, candidate_ids, num_candidates, BIASED, HAS_IDS):
    """bias [BLOCK] and ids, of the last candidate behind the last."""
    at = tl.minimum(j, num_candidates - 1)
    added, known = at, at
    if BIASED:
        added = tl.load(bias + at).to(tl.float32)
    if HAS_IDS:
        known = tl.load(candidate_ids + at)
    return added, known


@triton.jit
def _without_hits(score, j, place, known, wanted, HAS_TARGET: tl.constexpr):
    """Scores with accidental hits at -inf; all arguments broadcast to their shape."""
    hit = known == wanted
    if HAS_TARGET:
        hit = hit & (j != place)
    return tl.where(hit, NONE, score)


@triton.jit(do_not_specialize=["num_rows", "num_candidates", "tiles_per_part"])
def forward_kernel(
    hidden, weight, bias, scale, target, candidate_ids, target_ids, maximum, total,
    num_rows, num_candidates, tiles_per_part, stride_h, stride_w,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """maximum, total [parts, num_rows] float32: of the scaled scores of each part of the candidates.

    A program for each BLOCK_M rows and each part; rows fastest, so that programs at work share candidates.
    """
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    part = tl.program_id(0) // num_tiles
    i = (tl.program_id(0) % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.minimum(i, num_rows - 1)
    h_block = _load_rows(hidden, at, stride_h, D, BLOCK_D)
    place, wanted = at, at
    if HAS_IDS:
        wanted = tl.load(target_ids + at)
        if HAS_TARGET:
            place = tl.load(target + at).to(tl.int32)
    factor = tl.load(scale)
    power = factor * LOG2E
    best = tl.full([BLOCK_M], NONE, tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    end = tl.minimum((part + 1) * tiles_per_part, tl.cdiv(num_candidates, BLOCK_N))
    for tile in range(part * tiles_per_part, end):
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        w_block = _load_rows(weight, tl.minimum(j, num_candidates - 1), stride_w, D, BLOCK_D)
        score = tl.dot(h_block, tl.trans(w_block), input_precision=PRECISION)
        added, known = _of_candidates(j, bias, candidate_ids, num_candidates, BIASED, HAS_IDS)
        if BIASED:
            score += added[None, :]
        if HAS_IDS:
            score = _without_hits(
                score, j[None, :], place[:, None], known[None, :], wanted[:, None], HAS_TARGET
            )
        if (tile + 1) * BLOCK_N > num_candidates:
            score = tl.where(j[None, :] < num_candidates, score, NONE)
        better = tl.maximum(best, tl.max(score, 1))
        finite = tl.where(better == NONE, 0.0, better)
        weights = tl.exp2(score * power - (finite * power)[:, None])
        sums = sums * tl.exp2((best - finite) * power) + tl.sum(weights, 1)
        best = better
    out = part.to(tl.int64) * num_rows + i
    tl.store(maximum + out, best * factor, mask=i < num_rows)
    tl.store(total + out, sums, mask=i < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def target_kernel(
    hidden, weight, bias, scale, target, scores, num_rows, stride_h, stride_w,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores [num_rows] float32, the scaled score of each row's target, of candidate 0 where it is -1.

    The diagonal of a tile, and not a sum over a row's own products: it must have the very bits of the score
    that `forward_kernel` sums, for the log-probability of a sure target is the difference of the two.
    """
    place = tl.arange(0, BLOCK)
    i = tl.program_id(0) * BLOCK + place
    at = tl.minimum(i, num_rows - 1)
    j = tl.maximum(tl.load(target + at), 0)
    h_block = _load_rows(hidden, at, stride_h, D, BLOCK_D)
    w_block = _load_rows(weight, j, stride_w, D, BLOCK_D)
    tile = tl.dot(h_block, tl.trans(w_block), input_precision=PRECISION)
    score = tl.sum(tl.where(place[:, None] == place[None, :], tile, 0.0), 1)
    if BIASED:
        score += tl.load(bias + j).to(tl.float32)
    tl.store(scores + i, score * tl.load(scale), mask=i < num_rows)


@triton.jit(do_not_specialize=["num_own", "num_other", "tiles_per_part"])
def backward_kernel(
    own, other, bias, scale, target, candidate_ids, target_ids, maximum, factor, of_target, marks,
    grad, grad_bias, num_own, num_other, tiles_per_part, stride_own, stride_other,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    OF_WEIGHT: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr,
    WITH_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad [parts, num_own, D] of hidden, or of the weight if OF_WEIGHT; grad_bias [parts, num_own] float32.

    A program for each BLOCK_M rows of its own operand and each part of the other one's. marks [own tiles,
    other tiles] uint8, not 0 where a tile of scores holds some row's target.
    """
    num_tiles = tl.cdiv(num_own, BLOCK_M)
    own_tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles
    mine = own_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own_block = _load_rows(own, tl.minimum(mine, num_own - 1), stride_own, D, BLOCK_D)
    if OF_WEIGHT:
        added, known = _of_candidates(mine, bias, candidate_ids, num_own, BIASED, HAS_IDS)
        added, known, j = added[:, None], known[:, None], mine[:, None]
    else:
        top, slope, share, place, wanted = _of_rows(
            mine, maximum, factor, of_target, target, target_ids, num_own, HAS_TARGET, HAS_IDS
        )
        top, slope, share, place, wanted = (
            top[:, None], slope[:, None], share[:, None], place[:, None], wanted[:, None]
        )  # fmt: skip
    inverse_temperature = tl.load(scale)
    power = inverse_temperature * LOG2E
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bias_sums = tl.zeros([BLOCK_M], tl.float32)
    other_tiles = tl.cdiv(num_other, BLOCK_N)
    own_marks = marks + own_tile.to(tl.int64) * other_tiles
    end = tl.minimum((part + 1) * tiles_per_part, other_tiles)
    for tile in range(part * tiles_per_part, end):
        theirs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        block = _load_rows(other, tl.minimum(theirs, num_other - 1), stride_other, D, BLOCK_D)
        score = tl.dot(own_block, tl.trans(block), input_precision=PRECISION)
        if OF_WEIGHT:
            top, slope, share, place, wanted = _of_rows(
                theirs, maximum, factor, of_target, target, target_ids, num_other, HAS_TARGET, HAS_IDS
            )
            top, slope, share, place, wanted = (
                top[None, :], slope[None, :], share[None, :], place[None, :], wanted[None, :]
            )  # fmt: skip
        else:
            added, known = _of_candidates(theirs, bias, candidate_ids, num_other, BIASED, HAS_IDS)
            added, known, j = added[None, :], known[None, :], theirs[None, :]
        if BIASED:
            score += added
        if HAS_IDS:
            score = _without_hits(score, j, place, known, wanted, HAS_TARGET)
        slopes = tl.exp2(score * power - top) * slope
        if HAS_TARGET:
            if tl.load(own_marks + tile) != 0:
                slopes = tl.where(j == place, slopes + share, slopes)
        if not OF_WEIGHT:
            if (tile + 1) * BLOCK_N > num_other:
                slopes = tl.where(j < num_other, slopes, 0.0)
        if WITH_BIAS:
            bias_sums += tl.sum(slopes, 1)
        sums = tl.dot(slopes.to(block.dtype), block, sums, input_precision=PRECISION)
    row = part.to(tl.int64) * num_own + mine
    column = tl.arange(0, BLOCK_D)
    inside = (mine[:, None] < num_own) & (column[None, :] < D)
    tl.store(grad + row[:, None] * D + column[None, :], sums * inverse_temperature, mask=inside)
    if WITH_BIAS:
        tl.store(grad_bias + row, bias_sums * inverse_temperature, mask=mine < num_own)
