"""Kernels for the work per row: outputs from partial sums, and gradients of scores from those of the
outputs."""

import math

import triton
import triton.language as tl

from recsys.ops.linear_logp.triton_kernels import LONGEST_INVERSE, _load_rows, _load_these, _row_or_none

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
