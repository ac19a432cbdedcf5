"""Online log-sum-exp over tiles of scores, and the products of their gradient with either operand.

Scores are raw inside of the kernels, hidden weight^T + bias, and are scaled inside of the exponential.
Products are summed in float32; in backward the gradient of the scores is complete, the target's share in it,
before it is rounded for the second product. With SPLIT, tiles that are whole have a loop of their own without
bounds, which takes fewer instructions and more registers. i counts rows of hidden, j rows of the weight: the
candidates.
"""

import math

import triton
import triton.language as tl

# What a kernel reads of module scope must be a constexpr.
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load_rows(
    matrix, first, count, stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D] from row `first`, zero behind column D. EDGE: behind the last row stands it again."""
    row = first + tl.arange(0, BLOCK)
    if EDGE:
        row = tl.minimum(row, count - 1)
    return _load_these(matrix, row, stride, D, BLOCK_D)


@triton.jit
def _load_these(matrix, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(row), BLOCK_D], zero behind column D."""
    column = tl.arange(0, BLOCK_D)
    pointers = matrix + row.to(tl.int64)[:, None] * stride + column[None, :]
    if D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=column[None, :] < D, other=0.0)


@triton.jit
def _without_hits(score, j, known, wanted, place, HAS_TARGET: tl.constexpr):
    """Scores with accidental hits at -inf; all arguments broadcast to their shape."""
    hit = known == wanted
    if HAS_TARGET:
        hit = hit & (j != place)
    return tl.where(hit, float("-inf"), score)


@triton.jit
def _sum_tile(
    best, sums, tile, h_block, wanted, place, weight, bias, candidate_ids, num_candidates, stride_w, power,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr, PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """`best` and `sums` [BLOCK_M] with one more tile of candidates. EDGE: not all of it is there."""
    first = tile * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    w_block = _load_rows(weight, first, num_candidates, stride_w, D, BLOCK_N, BLOCK_D, EDGE)
    score = tl.dot(h_block, tl.trans(w_block), input_precision=PRECISION)
    if BIASED:
        score += tl.load(bias + j)[None, :]
    if HAS_IDS:
        known = tl.load(candidate_ids + j)[None, :]
        score = _without_hits(score, j[None, :], known, wanted, place, HAS_TARGET)
    if EDGE:
        score = tl.where(j[None, :] < num_candidates, score, float("-inf"))
    better = tl.maximum(best, tl.max(score, 1))
    finite = tl.where(better == float("-inf"), 0.0, better)
    weights = tl.exp2(score * power - (finite * power)[:, None])
    return better, sums * tl.exp2((best - finite) * power) + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["num_rows", "num_candidates", "tiles_per_part"])
def forward_kernel(
    hidden, weight, bias, scale, target, candidate_ids, target_ids, maximum, total,
    num_rows, num_candidates, tiles_per_part, stride_h, stride_w,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """maximum, total [parts, num_rows] float32: of the scaled scores of each part of the candidates.

    A program for each BLOCK_M rows and each part; rows fastest, so that programs at work share candidates.
    bias and all ids go on to the end of a tile.
    """
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    part = tl.program_id(0) // num_tiles
    first = (tl.program_id(0) % num_tiles) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    h_block = _load_rows(hidden, first, num_rows, stride_h, D, BLOCK_M, BLOCK_D, True)
    wanted, place = i[:, None], i[:, None]
    if HAS_IDS:
        wanted = tl.load(target_ids + i)[:, None]
        if HAS_TARGET:
            place = tl.load(target + i).to(tl.int32)[:, None]
    factor = tl.load(scale)
    power = factor * LOG2E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, tl.cdiv(num_candidates, BLOCK_N))
    if SPLIT:
        whole = tl.minimum(end, num_candidates // BLOCK_N)
        for tile in range(start, whole):
            best, sums = _sum_tile(
                best, sums, tile, h_block, wanted, place, weight, bias, candidate_ids, num_candidates,
                stride_w, power, D, BLOCK_N, BLOCK_D, BIASED, HAS_TARGET, HAS_IDS, PRECISION, False,
            )  # fmt: skip
        for tile in tl.range(whole, end, num_stages=1):
            best, sums = _sum_tile(
                best, sums, tile, h_block, wanted, place, weight, bias, candidate_ids, num_candidates,
                stride_w, power, D, BLOCK_N, BLOCK_D, BIASED, HAS_TARGET, HAS_IDS, PRECISION, True,
            )  # fmt: skip
    else:
        for tile in range(start, end):
            best, sums = _sum_tile(
                best, sums, tile, h_block, wanted, place, weight, bias, candidate_ids, num_candidates,
                stride_w, power, D, BLOCK_N, BLOCK_D, BIASED, HAS_TARGET, HAS_IDS, PRECISION, True,
            )  # fmt: skip
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
    first = tl.program_id(0) * BLOCK
    i = first + place
    j = tl.maximum(tl.load(target + i), 0)
    h_block = _load_rows(hidden, first, num_rows, stride_h, D, BLOCK, BLOCK_D, True)
    w_block = _load_these(weight, j, stride_w, D, BLOCK_D)
    tile = tl.dot(h_block, tl.trans(w_block), input_precision=PRECISION)
    score = tl.sum(tl.where(place[:, None] == place[None, :], tile, 0.0), 1)
    if BIASED:
        score += tl.load(bias + j)
    tl.store(scores + i, score * tl.load(scale), mask=i < num_rows)


@triton.jit
def _add_tile(
    sums, bias_sums, tile, own_block, mine, top, slope, added, known, wanted, own_marks,
    other, bias, target, candidate_ids, target_ids, maximum, factor, of_target,
    num_other, stride_other, power,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    OF_WEIGHT: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr,
    WITH_BIAS: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """`sums` [BLOCK_M, BLOCK_D] and `bias_sums` [BLOCK_M] with one more tile of the other operand.

    top, slope and wanted are of rows, added and known of candidates: one side is given, the other loaded.
    """
    first = tile * BLOCK_N
    theirs = first + tl.arange(0, BLOCK_N)
    block = _load_rows(other, first, num_other, stride_other, D, BLOCK_N, BLOCK_D, EDGE)
    score = tl.dot(own_block, tl.trans(block), input_precision=PRECISION)
    if OF_WEIGHT:
        i, j = theirs[None, :], mine[:, None]
        top, slope = tl.load(maximum + theirs)[None, :], tl.load(factor + theirs)[None, :]
        if HAS_IDS:
            wanted = tl.load(target_ids + theirs)[None, :]
    else:
        i, j = mine[:, None], theirs[None, :]
        if BIASED:
            added = tl.load(bias + theirs)[None, :]
        if HAS_IDS:
            known = tl.load(candidate_ids + theirs)[None, :]
    if BIASED:
        score += added
    if HAS_IDS:
        place = i
        if HAS_TARGET:
            place = tl.load(target + i).to(tl.int32)
        score = _without_hits(score, j, known, wanted, place, HAS_TARGET)
    slopes = tl.exp2(score * power - top) * slope
    if HAS_TARGET:
        # With loads in it this remains a branch, which most tiles do not take.
        if tl.load(own_marks + tile) != 0:
            slopes = tl.where(j == tl.load(target + i).to(tl.int32), slopes + tl.load(of_target + i), slopes)
    if EDGE:
        if not OF_WEIGHT:
            slopes = tl.where(j < num_other, slopes, 0.0)
    if WITH_BIAS:
        bias_sums += tl.sum(slopes, 1)
    return tl.dot(slopes.to(block.dtype), block, sums, input_precision=PRECISION), bias_sums


@triton.jit(do_not_specialize=["num_own", "num_other", "tiles_per_part"])
def backward_kernel(
    own, other, bias, scale, target, candidate_ids, target_ids, maximum, factor, of_target, marks,
    grad, grad_bias, num_own, num_other, tiles_per_part, stride_own, stride_other,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    OF_WEIGHT: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr,
    WITH_BIAS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """grad [parts, num_own, D] of hidden, or of the weight if OF_WEIGHT; grad_bias [parts, num_own] float32.

    A program for each BLOCK_M rows of its own operand and each part of the other one's. marks [own tiles,
    other tiles] uint8, not 0 where a tile of scores holds some row's target. What is of rows or of candidates
    goes on to the end of a tile; maximum is in powers of 2, and infinite there.
    """
    num_tiles = tl.cdiv(num_own, BLOCK_M)
    own_tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles
    mine = own_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own_block = _load_rows(own, own_tile * BLOCK_M, num_own, stride_own, D, BLOCK_M, BLOCK_D, True)
    unused = mine[:, None]
    top, slope, added, known, wanted = unused, unused, unused, unused, unused
    if OF_WEIGHT:
        if BIASED:
            added = tl.load(bias + mine)[:, None]
        if HAS_IDS:
            known = tl.load(candidate_ids + mine)[:, None]
    else:
        top, slope = tl.load(maximum + mine)[:, None], tl.load(factor + mine)[:, None]
        if HAS_IDS:
            wanted = tl.load(target_ids + mine)[:, None]
    inverse_temperature = tl.load(scale)
    power = inverse_temperature * LOG2E
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bias_sums = tl.zeros([BLOCK_M], tl.float32)
    other_tiles = tl.cdiv(num_other, BLOCK_N)
    own_marks = marks + own_tile.to(tl.int64) * other_tiles
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, other_tiles)
    if SPLIT:
        whole = tl.minimum(end, num_other // BLOCK_N)
        for tile in range(start, whole):
            sums, bias_sums = _add_tile(
                sums, bias_sums, tile, own_block, mine, top, slope, added, known, wanted, own_marks,
                other, bias, target, candidate_ids, target_ids, maximum, factor, of_target,
                num_other, stride_other, power,
                D, BLOCK_N, BLOCK_D, OF_WEIGHT, BIASED, HAS_TARGET, HAS_IDS, WITH_BIAS, PRECISION, False,
            )  # fmt: skip
        for tile in tl.range(whole, end, num_stages=1):
            sums, bias_sums = _add_tile(
                sums, bias_sums, tile, own_block, mine, top, slope, added, known, wanted, own_marks,
                other, bias, target, candidate_ids, target_ids, maximum, factor, of_target,
                num_other, stride_other, power,
                D, BLOCK_N, BLOCK_D, OF_WEIGHT, BIASED, HAS_TARGET, HAS_IDS, WITH_BIAS, PRECISION, True,
            )  # fmt: skip
    else:
        for tile in range(start, end):
            sums, bias_sums = _add_tile(
                sums, bias_sums, tile, own_block, mine, top, slope, added, known, wanted, own_marks,
                other, bias, target, candidate_ids, target_ids, maximum, factor, of_target,
                num_other, stride_other, power,
                D, BLOCK_N, BLOCK_D, OF_WEIGHT, BIASED, HAS_TARGET, HAS_IDS, WITH_BIAS, PRECISION, True,
            )  # fmt: skip
    row = part.to(tl.int64) * num_own + mine
    column = tl.arange(0, BLOCK_D)
    inside = (mine[:, None] < num_own) & (column[None, :] < D)
    tl.store(grad + row[:, None] * D + column[None, :], sums * inverse_temperature, mask=inside)
    if WITH_BIAS:
        tl.store(grad_bias + row, bias_sums * inverse_temperature, mask=mine < num_own)
