"""Kernels of `linear_attention` that look at each chunk by itself: decays, scores of pairs, their gradients.

Between tokens i > j of a chunk a key decays by exp(g_i - g_j), where g sums the logarithms of decays from
the chunk's first token on. The two factors exp(g_i) and exp(-g_j) would overflow, so the pairs are split
hierarchically: at level h the chunk falls into blocks of 2 h tokens, and a pair whose tokens lie in
different halves of one block is anchored at the first token a of the second half,
exp(g_i - g_a) exp(g_a - g_j). Neither exponent is positive if decays forget. Each pair i > j belongs to
exactly one level, so a chunk of C tokens takes log2(C) products of matrices; the diagonal has no decay.

The delta rule needs (I + M)^-1 with M_ij = beta_i k_i k_j exp(g_i - g_j) for i > j. The same levels give it:
inverses of the halves of a block make the inverse of the block, which is as stable as substitution.
"""

import triton
import triton.language as tl


@triton.jit
def _factor(g, sums, row, count, STRIDE_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
            half, PER_HEAD: tl.constexpr):  # fmt: skip
    """exp of minus the distance of g to its anchor: [C, BLOCK_D], or [C, 1] with a decay a head."""
    anchor = tl.minimum(row // (2 * half) * (2 * half) + half, count - 1)[:, None]
    if PER_HEAD:
        at_anchor = tl.load(sums + anchor.to(tl.int64) * STRIDE_G)
    else:
        d = tl.arange(0, BLOCK_D)[None, :]
        at_anchor = tl.load(sums + anchor.to(tl.int64) * STRIDE_G + d, mask=d < D, other=0.0)
    second = (row % (2 * half) >= half)[:, None]
    distance = tl.where(second, g - at_anchor, at_anchor - g)
    return tl.exp(tl.where((row < count)[:, None], distance, 0.0))


@triton.jit
def _pairs_of_level(C: tl.constexpr, half):
    """True for the pairs [C, C] of tokens in the second (i) and first (j) half of one block."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i // (2 * half) == j // (2 * half)) & (i % (2 * half) >= half) & (j % (2 * half) < half)


@triton.jit
def _scores_below_diagonal(left, right, g, sums, row, count, STRIDE_G: tl.constexpr, D: tl.constexpr,
                           C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
                           PER_HEAD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """left_i right_j exp(g_i - g_j), summed over columns, for i > j, else 0: float32 [C, C]."""
    scores = tl.zeros([C, C], tl.float32)
    for level in range(LEVELS):
        factor = _factor(g, sums, row, count, STRIDE_G, D, BLOCK_D, 1 << level, PER_HEAD)
        rows, columns = (left * factor).to(left.dtype), (right * factor).to(right.dtype)
        product = tl.dot(rows, tl.trans(columns), input_precision=PRECISION)
        scores += tl.where(_pairs_of_level(C, 1 << level), product, 0.0)
    return scores


@triton.jit
def _inverse(below, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1, float32 [C, C], for a matrix with zeros on and above the diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for level in range(LEVELS):
        corner = tl.where(_pairs_of_level(C, 1 << level), below, 0.0)
        corner = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse


@triton.jit
def load_rows(pointer, row, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              FIRST):  # fmt: skip
    """[C, BLOCK]: columns from FIRST on of a chunk's rows, zeros outside."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = (row < count)[:, None] & (column < WIDTH)
    return tl.load(pointer + row[:, None].to(tl.int64) * STRIDE + column, mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, value, row, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
               FIRST):  # fmt: skip
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = (row < count)[:, None] & (column < WIDTH)
    tl.store(pointer + row[:, None].to(tl.int64) * STRIDE + column, value, mask=inside)


@triton.jit
def decay_sums_kernel(
    log_decay, chunks, sums,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums float32 [T, COLUMNS]: sums of `log_decay` from each chunk's first token on; for targets its copy.

    One program per chunk and BLOCK columns, columns fastest.
    """
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    chunk = chunks + (tl.program_id(0) // BLOCKS).to(tl.int64) * 4
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    row = tl.arange(0, C)[:, None]
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < COLUMNS)
    value = tl.load(log_decay + (first_row + row) * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    if is_target == 0:
        value = tl.cumsum(value, 0)
    tl.store(sums + (first_row + row) * COLUMNS + column, value, mask=inside)


@triton.jit(do_not_specialize=["scale"])
def scores_kernel(
    q, k, v, beta, sums, chunks, scores, inverses, key_answers, values, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes scores [T, H, C], the scaled q_i k_j exp(g_i - g_j) for j <= i. One program per chunk and head.

    With DELTA also inverses float32 [T, H, C], X = (I + M)^-1; key_answers [T, H, D], X (beta k exp(g)), by
    which the state before the chunk changes the values that its tokens add; and values [T, H, V], X (beta v).
    """
    chunk = chunks + (tl.program_id(0) // H).to(tl.int64) * 4
    head = tl.program_id(0) % H
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 0:
        return
    row = tl.arange(0, C)
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    sums += first_row * (H * G_WIDTH) + head * G_WIDTH
    queries = load_rows(q + first_row * STRIDE_Q + head * HEAD_Q, row, count, STRIDE_Q, D, BLOCK_D, 0)
    keys = load_rows(k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D, BLOCK_D, 0)
    if PER_HEAD:
        g = tl.load(sums + row[:, None] * H, mask=(row < count)[:, None], other=0.0)
    else:
        g = load_rows(sums, row, count, H * G_WIDTH, D, BLOCK_D, 0)
    on_diagonal = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    i, j = row[:, None], row[None, :]
    score = tl.where(i == j, on_diagonal[:, None], 0.0)
    if is_target == 0:
        score += _scores_below_diagonal(
            queries, keys, g, sums, row, count, H * G_WIDTH, D, C, LEVELS, BLOCK_D, PER_HEAD, PRECISION
        )
    store_rows(scores + (first_row * H + head) * C, score * scale, row, count, H * C, C, C, 0)
    if DELTA:
        weight = tl.load(beta + (first_row + row) * H + head, mask=row < count, other=0.0).to(tl.float32)
        inverse = tl.where(i == j, 1.0, 0.0)
        if is_target == 0:
            overlap = _scores_below_diagonal(
                keys, keys, g, sums, row, count, H * G_WIDTH, D, C, LEVELS, BLOCK_D, PER_HEAD, PRECISION
            )
            inverse = _inverse(weight[:, None] * overlap, C, LEVELS, PRECISION)
        store_rows(inverses + (first_row * H + head) * C, inverse, row, count, H * C, C, C, 0)
        weighted = weight[:, None] * keys.to(tl.float32) * tl.exp(g)
        answer = tl.dot(inverse.to(keys.dtype), weighted.to(keys.dtype), input_precision=PRECISION)
        store_rows(key_answers + (first_row * H + head) * D, answer, row, count, H * D, D, BLOCK_D, 0)
        for block in range((V + BLOCK_V - 1) // BLOCK_V):
            block_v = load_rows(
                v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, block * BLOCK_V
            )
            block_v = (weight[:, None] * block_v.to(tl.float32)).to(keys.dtype)
            added = tl.dot(inverse.to(keys.dtype), block_v, input_precision=PRECISION)
            store_rows(
                values + (first_row * H + head) * V, added, row, count, H * V, V, BLOCK_V, block * BLOCK_V
            )


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "scale"])
def pair_gradients_kernel(
    grad_out, q, k, v, beta, sums, chunks, inverses, values, added_grads, answer_grads,
    query_parts, key_parts, end_parts,
    grad_q, grad_k, grad_v, grad_decay, grad_beta, num_rows, num_chunks, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, PER_HEAD: tl.constexpr,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients by way of pairs within a chunk to those by way of the state, and finishes them.

    One program per chunk and head. By way of the state come, each in PARTS float32 parts to be summed:
    query_parts and key_parts [PARTS, T, H, D], end_parts [PARTS, chunks, H, D], the gradient of the decay of
    the whole chunk, and with DELTA answer_grads [PARTS, T, H, D] and added_grads [T, H, V], the gradient of
    the values [T, H, V] that tokens add. Writes all gradients, contiguous; grad_v and grad_beta with DELTA.

    A score s_ij exp(g_i - g_j) gives g the gradient (row i) - (column j) of s times its gradient, so that of
    g is q dq - k dk, summed over columns with a decay a head.
    """
    number = (tl.program_id(0) // H).to(tl.int64)
    chunk = chunks + number * 4
    head = tl.program_id(0) % H
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 0:
        return
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    token_head = first_row * H + head
    sums += token_head * G_WIDTH
    queries = load_rows(q + first_row * STRIDE_Q + head * HEAD_Q, row, count, STRIDE_Q, D, BLOCK_D, 0)
    keys = load_rows(k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D, BLOCK_D, 0)
    if PER_HEAD:
        g = tl.load(sums + row[:, None] * H, mask=(row < count)[:, None], other=0.0)
    else:
        g = load_rows(sums, row, count, H * G_WIDTH, D, BLOCK_D, 0)

    score_grad = tl.zeros([C, C], tl.float32)
    if DELTA:
        weight = tl.load(beta + (first_row + row) * H + head, mask=row < count, other=0.0).to(tl.float32)
        inverse = load_rows(inverses + token_head * C, row, count, H * C, C, C, 0)
        turned = tl.trans(inverse).to(keys.dtype)
        beta_grad = tl.zeros([C], tl.float32)
        overlap_grad = tl.zeros([C, C], tl.float32)
    for block in range((V + BLOCK_V - 1) // BLOCK_V):
        block_o = load_rows(grad_out + token_head * V, row, count, H * V, V, BLOCK_V, block * BLOCK_V)
        if DELTA:
            block_v = load_rows(values + token_head * V, row, count, H * V, V, BLOCK_V, block * BLOCK_V)
            added = load_rows(added_grads + token_head * V, row, count, H * V, V, BLOCK_V, block * BLOCK_V)
            wanted = tl.dot(turned, added.to(keys.dtype), input_precision=PRECISION)
            original = load_rows(
                v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, block * BLOCK_V
            )
            beta_grad += tl.sum(wanted * original.to(tl.float32), 1)
            store_rows(
                grad_v + token_head * V,
                weight[:, None] * wanted,
                row,
                count,
                H * V,
                V,
                BLOCK_V,
                block * BLOCK_V,
            )
            overlap_grad -= tl.dot(wanted.to(keys.dtype), tl.trans(block_v), input_precision=PRECISION)
        else:
            block_v = load_rows(
                v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, block * BLOCK_V
            )
        score_grad += tl.dot(block_o, tl.trans(block_v), input_precision=PRECISION)
    score_grad = tl.where((i < count) & (j < count), score_grad * scale, 0.0)

    # By way of the state.
    query_grad, key_grad = tl.zeros([C, BLOCK_D], tl.float32), tl.zeros([C, BLOCK_D], tl.float32)
    end_grad = tl.zeros([1, BLOCK_D], tl.float32)
    d = tl.arange(0, BLOCK_D)[None, :]
    if DELTA:
        answer_grad = tl.zeros([C, BLOCK_D], tl.float32)
    for part in range(PARTS):
        place = (part * num_rows + first_row) * H + head
        query_grad += load_rows(query_parts + place * D, row, count, H * D, D, BLOCK_D, 0)
        if DELTA:
            answer_grad += load_rows(answer_grads + place * D, row, count, H * D, D, BLOCK_D, 0)
        if is_target == 0:
            key_grad += load_rows(key_parts + place * D, row, count, H * D, D, BLOCK_D, 0)
            ends = end_parts + ((part * num_chunks + number) * H + head) * D
            end_grad += tl.load(ends + d, mask=d < D, other=0.0)
    if DELTA:
        # Gradients of keys as rows, apart from those as columns: they enter that of g with another sign.
        row_grad = tl.dot(turned, answer_grad.to(keys.dtype), input_precision=PRECISION) * tl.exp(g)
        beta_grad += tl.sum(keys.to(tl.float32) * row_grad, 1)
        row_grad *= weight[:, None]

    if is_target == 0:
        for level in range(LEVELS):
            factor = _factor(g, sums, row, count, H * G_WIDTH, D, BLOCK_D, 1 << level, PER_HEAD)
            pairs = _pairs_of_level(C, 1 << level)
            of_pairs = tl.where(pairs, score_grad, 0.0).to(keys.dtype)
            scaled_q, scaled_k = (queries * factor).to(keys.dtype), (keys * factor).to(keys.dtype)
            query_grad += factor * tl.dot(of_pairs, scaled_k, input_precision=PRECISION)
            key_grad += factor * tl.dot(tl.trans(of_pairs), scaled_q, input_precision=PRECISION)
            if DELTA:
                overlap = tl.dot(scaled_k, tl.trans(scaled_k), input_precision=PRECISION)
                chosen = tl.where(pairs, overlap_grad, 0.0)
                beta_grad += tl.sum(chosen * overlap, 1)
                chosen = (weight[:, None] * chosen).to(keys.dtype)
                row_grad += factor * tl.dot(chosen, scaled_k, input_precision=PRECISION)
                key_grad += factor * tl.dot(tl.trans(chosen), scaled_k, input_precision=PRECISION)

    wide_q, wide_k = queries.to(tl.float32), keys.to(tl.float32)
    decay_grad = wide_q * query_grad - wide_k * key_grad
    if DELTA:
        decay_grad += wide_k * row_grad
        key_grad += row_grad
        tl.store(grad_beta + (first_row + row) * H + head, beta_grad, mask=row < count)
    on_diagonal = tl.sum(tl.where(i == j, score_grad, 0.0), 1)[:, None]
    query_grad += on_diagonal * wide_k
    key_grad += on_diagonal * wide_q
    store_rows(grad_q + token_head * D, query_grad, row, count, H * D, D, BLOCK_D, 0)
    store_rows(grad_k + token_head * D, key_grad, row, count, H * D, D, BLOCK_D, 0)
    if PER_HEAD:
        head_grad = tl.sum(decay_grad, 1)
        if is_target == 0:
            head_grad = tl.cumsum(head_grad, 0, reverse=True) + tl.sum(tl.sum(end_grad, 1), 0)
        tl.store(grad_decay + token_head + row * H, head_grad, mask=row < count)
    else:
        if is_target == 0:
            decay_grad = tl.cumsum(decay_grad, 0, reverse=True) + end_grad
        store_rows(grad_decay + token_head * D, decay_grad, row, count, H * D, D, BLOCK_D, 0)
