"""Computes the online log-sum-exp over tiles of scores, and the products of their gradient with either
operand.

Inside the kernels scores are raw, hidden weight^T + bias; the exponential scales them. Products are summed in
float32. In backward the gradient of a score includes the target's share before it is rounded for the second
product. With SPLIT, complete tiles have a loop of their own without bounds checks, which takes fewer
instructions and more registers. i counts rows of hidden, j rows of the weight (the candidates). Matrices are
contiguous. With NORMED their rows are multiplied by their inverse norms.

Behind these stand the kernels for the work per row: outputs from partial sums, and gradients of scores from
those of the outputs.
"""

import math

import triton
import triton.language as tl

from recsys.ops.linear_logp.recompute import SHORTEST

# Kernels can read module constants only as constexpr.
LOG2E = tl.constexpr(math.log2(math.e))
LONGEST_INVERSE = tl.constexpr(1 / SHORTEST * (1 - 1e-6))
"""Larger inverse norms belong to rows that are divided by the constant `SHORTEST`, not by their norm."""


@triton.jit
def _load_rows(
    matrix, first, count,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Loads [BLOCK, BLOCK_D] from row `first` on, zero past column D. EDGE: rows past the end repeat the last
    row."""
    row = first + tl.arange(0, BLOCK)
    if EDGE:
        row = tl.minimum(row, count - 1)
    return _load_these(matrix, row, D, BLOCK_D)


@triton.jit
def _load_these(matrix, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads the given rows, [len(row), BLOCK_D], zero past column D."""
    column = tl.arange(0, BLOCK_D)
    pointers = matrix + row.to(tl.int64)[:, None] * D + column[None, :]
    if D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=column[None, :] < D, other=0.0)


@triton.jit
def _row_or_none(target, num_candidates):
    """Returns the target as int32, or -1 if it is not a row of the weight."""
    return tl.where((target >= 0) & (target < num_candidates), target, -1).to(tl.int32)


@triton.jit
def _without_hits(score, j, known, wanted, place, HAS_TARGET: tl.constexpr):
    """Returns the scores with accidental hits at -inf; all arguments broadcast to their shape."""
    hit = known == wanted
    if HAS_TARGET:
        hit = hit & (j != place)
    return tl.where(hit, float("-inf"), score)


@triton.jit
def _sum_tile(
    best, sums, tile, rows, candidates, power,
    SIZES: tl.constexpr, MODE: tl.constexpr, HAS_TARGET: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Merges a tile of candidates into `best` and `sums` [BLOCK_M]. EDGE: the tile may be incomplete.

    rows        block of hidden; target id, target row and inverse norm of each of its rows
    candidates  weight, bias, ids, inverse norms, number
    SIZES       D, BLOCK_N, BLOCK_D
    MODE        PRECISION, NORMED, BIASED, HAS_IDS
    """
    h_block, wanted, place, mine = rows
    weight, bias, candidate_ids, norms, num_candidates = candidates
    D: tl.constexpr = SIZES[0]
    BLOCK_N: tl.constexpr = SIZES[1]
    BLOCK_D: tl.constexpr = SIZES[2]
    first = tile * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    w_block = _load_rows(weight, first, num_candidates, D, BLOCK_N, BLOCK_D, EDGE)
    score = tl.dot(h_block, tl.trans(w_block), input_precision=MODE[0])
    if MODE[1]:
        score *= mine * tl.load(norms + j)[None, :]
    if MODE[2]:
        score += tl.load(bias + j)[None, :]
    if MODE[3]:
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
    hidden, weight, bias, scale, target, candidate_ids, target_ids, hidden_norms, weight_norms,
    maximum, total, num_rows, num_candidates, tiles_per_part,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_IDS: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Writes maximum and total [parts, num_rows] float32 of the scaled scores for each part of the
    candidates.

    One program runs per BLOCK_M rows and part; rows vary fastest, so that concurrent programs share
    candidates. Vectors of candidates are padded to the end of a tile.
    """
    SIZES: tl.constexpr = (D, BLOCK_N, BLOCK_D)
    MODE: tl.constexpr = (PRECISION, NORMED, BIASED, HAS_IDS)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    part = tl.program_id(0) // num_tiles
    first = (tl.program_id(0) % num_tiles) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    h_block = _load_rows(hidden, first, num_rows, D, BLOCK_M, BLOCK_D, True)
    wanted, place, mine = i[:, None], i[:, None], i[:, None]
    if HAS_IDS:
        wanted = tl.load(target_ids + i, mask=i < num_rows, other=0)[:, None]
        if HAS_TARGET:
            targets = tl.load(target + i, mask=i < num_rows, other=-1)
            place = _row_or_none(targets, num_candidates)[:, None]
    if NORMED:
        mine = tl.load(hidden_norms + i, mask=i < num_rows, other=0.0)[:, None]
    rows = (h_block, wanted, place, mine)
    candidates = (weight, bias, candidate_ids, weight_norms, num_candidates)
    factor = tl.load(scale)
    power = factor * LOG2E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, tl.cdiv(num_candidates, BLOCK_N))
    whole = start
    if SPLIT:
        whole = tl.minimum(end, num_candidates // BLOCK_N)
        for tile in range(start, whole):
            best, sums = _sum_tile(best, sums, tile, rows, candidates, power, SIZES, MODE, HAS_TARGET, False)
    for tile in tl.range(whole, end, num_stages=1 if SPLIT else None):
        best, sums = _sum_tile(best, sums, tile, rows, candidates, power, SIZES, MODE, HAS_TARGET, True)
    out = part.to(tl.int64) * num_rows + i
    tl.store(maximum + out, best * factor, mask=i < num_rows)
    tl.store(total + out, sums, mask=i < num_rows)


@triton.jit
def _add_tile(
    all_sums, tile, owned, streamed, vectors, power,
    SIZES: tl.constexpr, MODE: tl.constexpr, KIND: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of the streamed operand to the sums of the tile that the program owns.

    all_sums  gradient [BLOCK_M, BLOCK_D]; sums of the bias and of the scale [BLOCK_M]
    owned     block; numbers, inverse norms and marks of its rows; top, sign and wanted if these are rows of
              hidden; added and known if they are candidates
    streamed  the operand, its inverse norms, its number of rows
    vectors   tops, signs, of_target, rows and target_ids of hidden; bias and candidate_ids of the weight
    SIZES     D, BLOCK_N, BLOCK_D
    MODE      PRECISION, NORMED, BIASED, HAS_IDS
    KIND      OF_WEIGHT, HAS_TARGET, WITH_BIAS, WITH_SCALE

    A program that owns rows of hidden applies the sign at the end.
    """
    sums, bias_sums, scale_sums = all_sums
    owned_block, mine, owned_norms, owned_marks, top, sign, wanted, added, known = owned
    operand, streamed_norms, num_streamed = streamed
    tops, signs, of_target, rows, target_ids, bias, candidate_ids = vectors
    D: tl.constexpr = SIZES[0]
    BLOCK_N: tl.constexpr = SIZES[1]
    BLOCK_D: tl.constexpr = SIZES[2]
    NORMED: tl.constexpr = MODE[1]
    BIASED: tl.constexpr = MODE[2]
    HAS_IDS: tl.constexpr = MODE[3]
    OF_WEIGHT: tl.constexpr = KIND[0]
    HAS_TARGET: tl.constexpr = KIND[1]
    first = tile * BLOCK_N
    theirs = first + tl.arange(0, BLOCK_N)
    block = _load_rows(operand, first, num_streamed, D, BLOCK_N, BLOCK_D, EDGE)
    score = tl.dot(owned_block, tl.trans(block), input_precision=MODE[0])
    if OF_WEIGHT:
        i, j = theirs[None, :], mine[:, None]
        top, sign = tl.load(tops + theirs)[None, :], tl.load(signs + theirs)[None, :]
        if HAS_IDS:
            wanted = tl.load(target_ids + theirs)[None, :]
    else:
        i, j = mine[:, None], theirs[None, :]
        if BIASED:
            added = tl.load(bias + theirs)[None, :]
        if HAS_IDS:
            known = tl.load(candidate_ids + theirs)[None, :]
    if NORMED:
        their_norms = tl.load(streamed_norms + theirs)[None, :]
        score *= owned_norms * their_norms
    if BIASED:
        score += added
    if HAS_IDS:
        place = i
        if HAS_TARGET:
            place = tl.load(rows + i)
        score = _without_hits(score, j, known, wanted, place, HAS_TARGET)
    score_grads = tl.exp2(score * power - top)
    if OF_WEIGHT:
        score_grads *= sign
    if HAS_TARGET:
        # The load in the condition keeps this a branch, which most tiles skip.
        if tl.load(owned_marks + tile) != 0:
            right = tl.load(of_target + i)
            if not OF_WEIGHT:
                right *= sign
            score_grads = tl.where(j == tl.load(rows + i), right, score_grads)
    if EDGE:
        if not OF_WEIGHT:
            score_grads = tl.where(j < num_streamed, score_grads, 0.0)
    if KIND[2]:
        bias_sums += tl.sum(score_grads, 1)
    if KIND[3]:
        # The gradient is 0 where the score is -inf.
        scale_sums += tl.sum(tl.where(score_grads == 0.0, 0.0, score_grads * score), 1)
    if NORMED:
        score_grads *= their_norms
    added_up = tl.dot(score_grads.to(block.dtype), block, sums, input_precision=MODE[0])
    return added_up, bias_sums, scale_sums


@triton.jit(do_not_specialize=["num_owned", "num_streamed", "tiles_per_part"])
def backward_kernel(
    owned, streamed, bias, scale, rows, candidate_ids, target_ids, owned_norms, streamed_norms,
    tops, signs, of_target, marks, grad, grad_bias, grad_scale,
    num_owned, num_streamed, tiles_per_part,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    OF_WEIGHT: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr,
    HAS_IDS: tl.constexpr, WITH_BIAS: tl.constexpr, WITH_SCALE: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Writes grad [parts, num_owned, D] of hidden, or of the weight if OF_WEIGHT, and grad_bias and
    grad_scale [parts, num_owned] float32; grad_scale holds each row's share.

    One program runs per BLOCK_M rows of the operand that it owns and per part of the other operand. rows,
    tops, signs and of_target are as `upstream_kernel` writes them; marks uint8 [owned tiles,
    streamed tiles] is nonzero where a tile of scores holds a row's target. Vectors are padded to the end of a
    tile.
    """
    SIZES: tl.constexpr = (D, BLOCK_N, BLOCK_D)
    MODE: tl.constexpr = (PRECISION, NORMED, BIASED, HAS_IDS)
    KIND: tl.constexpr = (OF_WEIGHT, HAS_TARGET, WITH_BIAS, WITH_SCALE)
    num_tiles = tl.cdiv(num_owned, BLOCK_M)
    owned_tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles
    mine = owned_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    owned_block = _load_rows(owned, owned_tile * BLOCK_M, num_owned, D, BLOCK_M, BLOCK_D, True)
    unused = mine[:, None]
    top, sign, added, known, wanted, norms = unused, unused, unused, unused, unused, unused
    if OF_WEIGHT:
        if BIASED:
            added = tl.load(bias + mine)[:, None]
        if HAS_IDS:
            known = tl.load(candidate_ids + mine)[:, None]
    else:
        top, sign = tl.load(tops + mine)[:, None], tl.load(signs + mine)[:, None]
        if HAS_IDS:
            wanted = tl.load(target_ids + mine)[:, None]
    if NORMED:
        norms = tl.load(owned_norms + mine)[:, None]
    inverse_temperature = tl.load(scale)
    power = inverse_temperature * LOG2E
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bias_sums = tl.zeros([BLOCK_M], tl.float32)
    scale_sums = tl.zeros([BLOCK_M], tl.float32)
    streamed_tiles = tl.cdiv(num_streamed, BLOCK_N)
    owned_marks = marks + owned_tile.to(tl.int64) * streamed_tiles
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, streamed_tiles)
    owned_part = (owned_block, mine, norms, owned_marks, top, sign, wanted, added, known)
    theirs = (streamed, streamed_norms, num_streamed)
    vectors = (tops, signs, of_target, rows, target_ids, bias, candidate_ids)
    whole = start
    if SPLIT:
        whole = tl.minimum(end, num_streamed // BLOCK_N)
        for tile in range(start, whole):
            sums, bias_sums, scale_sums = _add_tile(
                (sums, bias_sums, scale_sums), tile, owned_part, theirs, vectors, power,
                SIZES, MODE, KIND, False,
            )  # fmt: skip
    for tile in tl.range(whole, end, num_stages=1 if SPLIT else None):
        sums, bias_sums, scale_sums = _add_tile(
            (sums, bias_sums, scale_sums), tile, owned_part, theirs, vectors, power,
            SIZES, MODE, KIND, True,
        )  # fmt: skip
    sums *= inverse_temperature
    if not OF_WEIGHT:
        sums *= sign
    if NORMED:
        wide = owned_block.to(tl.float32)
        along = tl.sum(sums * wide, 1)[:, None] * norms * norms
        along = tl.where(norms < LONGEST_INVERSE, along, 0.0)
        sums = (sums - wide * along) * norms
    row = part.to(tl.int64) * num_owned + mine
    column = tl.arange(0, BLOCK_D)
    inside = (mine[:, None] < num_owned) & (column[None, :] < D)
    tl.store(grad + row[:, None] * D + column[None, :], sums, mask=inside)
    if WITH_BIAS:
        tl.store(grad_bias + row, bias_sums * inverse_temperature, mask=mine < num_owned)
    if WITH_SCALE:
        signed = scale_sums * tl.load(signs + mine)
        tl.store(grad_scale + row, signed, mask=mine < num_owned)


LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _target_scores(
    place, first, hidden, weight, bias, hidden_norms, weight_norms, scale, num_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the scaled scores [BLOCK] of the rows from `first` on with the candidates `place`.

    It takes the diagonal of a tile instead of summing each row's products: the scores must have the very bits
    of those in `forward_kernel`, since the log-probability of a confident target is the difference of the
    two.
    """
    number = tl.arange(0, BLOCK)
    h_block = _load_rows(hidden, first, num_rows, D, BLOCK, BLOCK_D, True)
    w_block = _load_these(weight, place, D, BLOCK_D)
    tile = tl.dot(h_block, tl.trans(w_block), input_precision=PRECISION)
    score = tl.sum(tl.where(number[:, None] == number[None, :], tile, 0.0), 1)
    if NORMED:
        i = tl.minimum(first + number, num_rows - 1)
        score *= tl.load(hidden_norms + i) * tl.load(weight_norms + place)
    if BIASED:
        score += tl.load(bias + place)
    return score * tl.load(scale)


@triton.jit(do_not_specialize=["num_rows", "num_candidates"])
def target_kernel(
    hidden, weight, bias, scale, target, hidden_norms, weight_norms, scores, num_rows, num_candidates,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes scores [num_rows] float32: each row's score with its target, or with candidate 0 where it has
    none."""
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    place = _row_or_none(tl.load(target + i, mask=i < num_rows, other=-1), num_candidates)
    score = _target_scores(
        tl.maximum(place, 0), first, hidden, weight, bias, hidden_norms, weight_norms, scale, num_rows,
        D, BLOCK, BLOCK_D, NORMED, BIASED, PRECISION,
    )  # fmt: skip
    tl.store(scores + i, score, mask=i < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_candidates", "parts", "ignore_index"])
def finish_kernel(
    hidden, weight, bias, scale, target, hidden_norms, weight_norms, maxima, totals, outputs,
    num_rows, num_candidates, parts, ignore_index,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, HAS_TARGET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes outputs [4, num_rows] float32, the fields of `recompute.RowOutputs`, from maxima and totals
    [parts, num_rows]."""
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < num_rows
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = i.to(tl.int64)
    for _part in range(parts):
        best = tl.maximum(best, tl.load(maxima + at, mask=inside, other=0.0))
        at += num_rows
    finite = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([BLOCK], tl.float32)
    at = i.to(tl.int64)
    for _part in range(parts):
        theirs = tl.load(maxima + at, mask=inside, other=0.0)
        total += tl.load(totals + at, mask=inside, other=1.0) * tl.exp(theirs - finite)
        at += num_rows
    log_total = tl.log(total)
    logp = tl.zeros([BLOCK], tl.float32)
    if HAS_TARGET:
        target_of = tl.load(target + i, mask=inside, other=0)
        place = _row_or_none(target_of, num_candidates)
        score = _target_scores(
            tl.maximum(place, 0), first, hidden, weight, bias, hidden_norms, weight_norms, scale, num_rows,
            D, BLOCK, BLOCK_D, NORMED, BIASED, PRECISION,
        )  # fmt: skip
        instead = tl.where(target_of == ignore_index, 0.0, float("nan"))
        logp = tl.where(place >= 0, score - best - log_total, instead)
    tl.store(outputs + i, best, mask=inside)
    tl.store(outputs + num_rows + i, total, mask=inside)
    tl.store(outputs + 2 * num_rows + i, logp, mask=inside)
    tl.store(outputs + 3 * num_rows + i, best + log_total, mask=inside)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_candidates", "stride_logp", "stride_lse",
        "hidden_tiles", "weight_tiles", "weight_marks",
    ]
)  # fmt: skip
def upstream_kernel(
    grad_logp, grad_lse, outputs, target, vectors, rows, marks,
    num_rows, num_candidates, stride_logp, stride_lse, hidden_tiles, weight_tiles, weight_marks,
    HAS_LOGP: tl.constexpr, HAS_LSE: tl.constexpr, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
    HIDDEN_ROWS: tl.constexpr, HIDDEN_OTHERS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, WEIGHT_OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes what the gradient kernels read about rows, padded to a whole number of blocks:

        vectors     [3, blocks * BLOCK] float32: top, sign, of_target. With z the scaled scores times log2(e),
                    dz[i, j] = sign[i] 2^(z[i, j] - top[i]), but dz[i, rows[i]] = of_target[i]
        rows        [blocks * BLOCK] int32, targets, -1 for none
        marks       uint8, zeros on entry: 1 for each tile of scores with a target in it, [tiles of hidden,
                    hidden_tiles] and from weight_marks on [tiles of the weight, weight_tiles]

    A row that does not count has top = inf.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    size = tl.num_programs(0) * BLOCK
    of_logp = tl.zeros([BLOCK], tl.float32)
    of_lse = tl.zeros([BLOCK], tl.float32)
    if HAS_LOGP:
        of_logp = tl.load(grad_logp + i.to(tl.int64) * stride_logp, mask=inside, other=0.0)
    if HAS_LSE:
        of_lse = tl.load(grad_lse + i.to(tl.int64) * stride_lse, mask=inside, other=0.0)
    best = tl.load(outputs + i, mask=inside, other=0.0)
    total = tl.load(outputs + num_rows + i, mask=inside, other=0.0)
    counts = inside & (total > 0.0)
    place = tl.full([BLOCK], -1, tl.int32)
    of_target = tl.zeros([BLOCK], tl.float32)
    if HAS_TARGET:
        place = _row_or_none(tl.load(target + i, mask=inside, other=-1), num_candidates)
        counts = counts & (place >= 0)
        logp = tl.load(outputs + 2 * num_rows + i, mask=inside, other=0.0)
        # 1 - exp(logp), accurate also where logp is near 0.
        series = -logp * (1.0 + logp * (0.5 + logp * (1 / 6 + logp * (1 / 24 + logp * (1 / 120)))))
        rest = tl.where(logp > -0.1, series, 1.0 - tl.exp(logp))
        of_target = tl.where(place >= 0, of_lse * tl.exp(logp) + of_logp * rest, 0.0)
    else:
        of_logp = tl.zeros([BLOCK], tl.float32)
    factor = tl.where(counts, (of_lse - of_logp) / total, 0.0)
    top = best * LOG2E - tl.log2(tl.abs(factor))
    top = tl.where(factor == 0.0, float("inf"), top)
    tl.store(vectors + i, top)
    tl.store(vectors + size + i, tl.where(factor < 0.0, -1.0, 1.0))
    tl.store(vectors + 2 * size + i, of_target)
    tl.store(rows + i, place)
    if HAS_TARGET:
        mark = tl.full([BLOCK], 1, tl.uint8)
        of_hidden = (i // HIDDEN_ROWS).to(tl.int64) * hidden_tiles + place // HIDDEN_OTHERS
        tl.store(marks + of_hidden, mark, mask=place >= 0)
        of_weight = weight_marks + (place // WEIGHT_ROWS).to(tl.int64) * weight_tiles + i // WEIGHT_OTHERS
        tl.store(marks + of_weight, mark, mask=place >= 0)


@triton.jit(do_not_specialize=["num_rows"])
def project_kernel(
    grad, rows, norms, out, num_rows,
    D: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes out [num_rows, D], `recompute.projected` of grad [num_rows, STRIDE]; both may be one tensor.

    norms: [num_rows] float32, inverse norms.
    """
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (i < num_rows) & (column < D)
    given = tl.load(grad + i * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows + i * D + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(norms + i, mask=i < num_rows, other=0.0)
    along = tl.sum(given * row, 1)[:, None] * norm * norm
    along = tl.where(norm < LONGEST_INVERSE, along, 0.0)
    tl.store(out + i * D + column, (given - row * along) * norm, mask=inside)
