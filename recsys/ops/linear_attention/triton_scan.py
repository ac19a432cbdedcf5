"""Kernels of `linear_attention` that carry the state from chunk to chunk, forward and backward.

A program takes one segment, one head, all D rows of the state and BLOCK_V of its columns, and keeps them in
registers. Where samples have several segments, each segment is first summed up from a state of zeros
(`LOCAL`), and `combine_kernel` makes of these sums the states that the segments start from. With c the last
token of a chunk and S the state before it, in float32:

    out  = scale (q exp(g)) S + scores u      u = v, or with the delta rule values - key_answers S
    S'   = exp(g_c) S + (k exp(g_c - g))^T u

Targets are chunks of their own behind a sample's last segment; they read the state and do not change it.
"""

import triton
import triton.language as tl

from recsys.ops.linear_attention.triton_scores import load_rows, store_rows


@triton.jit
def _decays(sums, row, count, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
            PER_HEAD: tl.constexpr):  # fmt: skip
    """g [C, BLOCK_D] or [C, 1], and its last row [1, BLOCK_D] or [1, 1]; `sums` points to the first token."""
    if PER_HEAD:
        g = tl.load(sums + row[:, None] * H, mask=(row < count)[:, None], other=0.0)
        last = tl.load(sums + (count - 1) * H + tl.zeros([1, 1], tl.int32))
    else:
        g = load_rows(sums, row, count, H * D, D, BLOCK_D, 0)
        d = tl.arange(0, BLOCK_D)[None, :]
        last = tl.load(sums + (count - 1) * (H * D) + d, mask=d < D, other=0.0)
    return g, last


@triton.jit
def _state_at(pointer, index, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr):
    """Pointers to the program's block [BLOCK_D, BLOCK_V] of state `index`, and whether they lie inside."""
    d = tl.arange(0, BLOCK_D)[:, None]
    column = (tl.program_id(0) % ((V + BLOCK_V - 1) // BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return pointer + index.to(tl.int64) * (D * V) + d * V + column, (d < D) & (column < V)


@triton.jit(do_not_specialize=["scale"])
def forward_kernel(
    q, k, v, sums, scores, key_answers, starts, chunks, segments, segment_offsets,
    out, states, final, ends, end_decays, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr,
    MODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per segment, head and BLOCK_V columns. What it writes depends on MODE:

    "out": out [T, H, V] and final [B, H, D, V].
    "states": states [chunks, H, D, V], the state before each chunk of history.
    "local": ends [segments, H, D, V], the state behind the segment if it starts from zeros, and end_decays
        [segments, H, D], the sum of its logarithms of decays; nothing of a sample's last segment.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS % H
    number = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    segment = segments + number * 4
    sample, first_chunk = tl.load(segment), tl.load(segment + 1)
    num_history, num_target_chunks = tl.load(segment + 2), tl.load(segment + 3)
    if sample < 0:
        return
    is_last = number + 1 == tl.load(segment_offsets + sample + 1)
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    FIRST = (tl.program_id(0) % BLOCKS) * BLOCK_V
    row = tl.arange(0, C)
    end = num_history
    if MODE == "local":
        if is_last:
            return
        state = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        end_decay = tl.zeros([1, 1 if PER_HEAD else BLOCK_D], tl.float32)
    else:
        start, inside = _state_at(starts, number * H + head, D, V, BLOCK_D, BLOCK_V)
        state = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    if MODE == "out":
        end += num_target_chunks
    for step in range(0, end):
        chunk = chunks + (first_chunk + step) * 4
        first_row, count = tl.load(chunk + 1), tl.load(chunk + 2)
        token_head = first_row * H + head
        g, last = _decays(sums + token_head * G_WIDTH, row, count, H, D, BLOCK_D, PER_HEAD)
        block_v = load_rows(v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V,
                                FIRST)  # fmt: skip
        if DELTA:
            answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
            answered = tl.dot(answer, state.to(answer.dtype), input_precision=PRECISION)
            block_v = (block_v.to(tl.float32) - answered).to(answer.dtype)
        if MODE == "out":
            queries = load_rows(q + first_row * STRIDE_Q + head * HEAD_Q, row, count, STRIDE_Q, D, BLOCK_D, 0)
            decayed = (queries.to(tl.float32) * tl.exp(g) * scale).to(queries.dtype)
            score = load_rows(scores + token_head * C, row, count, H * C, C, C, 0)
            result = tl.dot(decayed, state.to(queries.dtype), input_precision=PRECISION)
            result += tl.dot(score, block_v, input_precision=PRECISION)
            store_rows(out + token_head * V, result, row, count, H * V, V, BLOCK_V, FIRST)
        if step < num_history:
            if MODE == "states":
                pointer, inside = _state_at(states, (first_chunk + step) * H + head, D, V, BLOCK_D, BLOCK_V)
                tl.store(pointer, state, mask=inside)
            keys = load_rows(k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D, BLOCK_D, 0)
            remaining = (keys.to(tl.float32) * tl.exp(last - g)).to(keys.dtype)
            added = tl.dot(tl.trans(remaining), block_v, input_precision=PRECISION)
            state = state * tl.trans(tl.exp(last)) + added
            if MODE == "local":
                end_decay += last
    if MODE == "local":
        pointer, inside = _state_at(ends, number * H + head, D, V, BLOCK_D, BLOCK_V)
        tl.store(pointer, state, mask=inside)
        if tl.program_id(0) % BLOCKS == 0:
            d = tl.arange(0, BLOCK_D)[None, :]
            decay = end_decay + tl.zeros([1, BLOCK_D], tl.float32)
            tl.store(end_decays + (number * H + head) * D + d, decay, mask=d < D)
    if MODE == "out":
        if is_last:
            pointer, inside = _state_at(final, sample * H + head, D, V, BLOCK_D, BLOCK_V)
            tl.store(pointer, state, mask=inside)


@triton.jit
def combine_kernel(
    first, local, decays, segment_offsets, combined,
    STATE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """combined [segments, H, D, V]: the state that each segment starts from, or with REVERSE its gradient at
    the end; `first` [B, H, D, V] is that of the first segment (the last one), `local` what a segment adds.

    One program per sample and BLOCK of the STATE = H D V numbers of a state; `decays` [segments, H, D].
    """
    BLOCKS: tl.constexpr = (STATE + BLOCK - 1) // BLOCK
    sample = (tl.program_id(0) // BLOCKS).to(tl.int64)
    place = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = place < STATE
    begin, end = tl.load(segment_offsets + sample), tl.load(segment_offsets + sample + 1)
    value = tl.load(first + sample * STATE + place, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, end - begin):
        segment = end - 1 - step if REVERSE else begin + step
        tl.store(combined + segment * STATE + place, value, mask=inside)
        if step + 1 < end - begin:
            decay = tl.load(decays + segment * (STATE // V) + place // V, mask=inside, other=0.0)
            added = tl.load(local + segment * STATE + place, mask=inside, other=0.0)
            value = value * tl.exp(decay) + added


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "scale"])
def backward_kernel(
    grad_out, q, k, v, sums, scores, key_answers, states, final, ends, chunks, segments, segment_offsets,
    query_parts, key_parts, end_parts, answer_grads, added_grads, values, grad_starts, local, end_decays,
    num_rows, num_chunks, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr,
    LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes through a segment from its end and carries the gradient of the state. One program per segment,
    head and BLOCK_V columns.

    `ends` [segments, H, D, V] has the gradient of the state behind each segment's history, less what targets
    add to it. Writes the gradients by way of the state, as `pair_gradients_kernel` reads them, one part per
    block of columns; added_grads [T, H, V], the gradient of u, which without DELTA is that of v, with DELTA u
    itself to `values`; and grad_starts [B, H, D, V]. With LOCAL, without DELTA, it only writes `local`
    [segments, H, D, V], the gradient before the segment if that behind it is zero, and end_decays; nothing of
    a sample's first segment.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    part = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % H
    number = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    segment = segments + number * 4
    sample, first_chunk = tl.load(segment), tl.load(segment + 1)
    num_history, num_target_chunks = tl.load(segment + 2), tl.load(segment + 3)
    if sample < 0:
        return
    is_first = number == tl.load(segment_offsets + sample)
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    FIRST = part * BLOCK_V
    row = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)[None, :]
    if LOCAL:
        if is_first:
            return
        state_grad = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        end_decay = tl.zeros([1, 1 if PER_HEAD else BLOCK_D], tl.float32)
    else:
        end, inside = _state_at(ends, number * H + head, D, V, BLOCK_D, BLOCK_V)
        state_grad = tl.load(end, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, num_history + num_target_chunks):
        # Targets first: they stand behind the history.
        is_history = step >= num_target_chunks
        place = num_history + num_target_chunks - 1 - step
        chunk = chunks + (first_chunk + place) * 4
        first_row, count = tl.load(chunk + 1), tl.load(chunk + 2)
        token_head = first_row * H + head
        g, last = _decays(sums + token_head * G_WIDTH, row, count, H, D, BLOCK_D, PER_HEAD)
        block_o = load_rows(grad_out + token_head * V, row, count, H * V, V, BLOCK_V, FIRST)
        queries = load_rows(q + first_row * STRIDE_Q + head * HEAD_Q, row, count, STRIDE_Q, D, BLOCK_D, 0)
        decayed = (queries.to(tl.float32) * tl.exp(g) * scale).to(queries.dtype)
        by_queries = tl.dot(tl.trans(decayed), block_o, input_precision=PRECISION)
        if not LOCAL:
            if is_history:
                pointer, inside = _state_at(states, (first_chunk + place) * H + head, D, V, BLOCK_D, BLOCK_V)
            else:
                pointer, inside = _state_at(final, sample * H + head, D, V, BLOCK_D, BLOCK_V)
            state = tl.load(pointer, mask=inside, other=0.0)
            narrow = state.to(queries.dtype)
            query_grad = tl.dot(block_o, tl.trans(narrow), input_precision=PRECISION) * tl.exp(g) * scale
            parts = (part * num_rows + first_row) * H + head
            store_rows(query_parts + parts * D, query_grad, row, count, H * D, D, BLOCK_D, 0)
            block_v = load_rows(v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V,
                                FIRST)  # fmt: skip
            score = load_rows(scores + token_head * C, row, count, H * C, C, C, 0)
            added_grad = tl.dot(tl.trans(score), block_o, input_precision=PRECISION)
            if DELTA:
                answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
                answered = tl.dot(answer, narrow, input_precision=PRECISION)
                block_v = (block_v.to(tl.float32) - answered).to(queries.dtype)
                store_rows(values + token_head * V, block_v, row, count, H * V, V, BLOCK_V, FIRST)
            if is_history:
                keys = load_rows(k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D,
                                 BLOCK_D, 0)  # fmt: skip
                factor = tl.exp(last - g)
                remaining = (keys.to(tl.float32) * factor).to(keys.dtype)
                narrow_grad = state_grad.to(keys.dtype)
                added_grad += tl.dot(remaining, narrow_grad, input_precision=PRECISION)
                key_grad = tl.dot(block_v, tl.trans(narrow_grad), input_precision=PRECISION) * factor
                store_rows(key_parts + parts * D, key_grad, row, count, H * D, D, BLOCK_D, 0)
                key_grad = tl.where((row < count)[:, None], key_grad, 0.0)
                end_grad = tl.sum(keys.to(tl.float32) * key_grad, 0)[None, :]
                end_grad += tl.exp(last) * tl.sum(state * state_grad, 1)[None, :]
                at = ((part * num_chunks + first_chunk + place) * H + head) * D
                tl.store(end_parts + at + d, end_grad, mask=d < D)
            store_rows(added_grads + token_head * V, added_grad, row, count, H * V, V, BLOCK_V, FIRST)
            if DELTA:
                narrow_added = added_grad.to(queries.dtype)
                answer_grad = -tl.dot(narrow_added, tl.trans(narrow), input_precision=PRECISION)
                store_rows(answer_grads + parts * D, answer_grad, row, count, H * D, D, BLOCK_D, 0)
                by_queries -= tl.dot(tl.trans(answer), narrow_added, input_precision=PRECISION)
        if is_history:
            state_grad = state_grad * tl.trans(tl.exp(last))
            if LOCAL:
                end_decay += last
        state_grad += by_queries
    if LOCAL:
        pointer, inside = _state_at(local, number * H + head, D, V, BLOCK_D, BLOCK_V)
        tl.store(pointer, state_grad, mask=inside)
        if part == 0:
            decay = end_decay + tl.zeros([1, BLOCK_D], tl.float32)
            tl.store(end_decays + (number * H + head) * D + d, decay, mask=d < D)
    else:
        if is_first:
            start, inside = _state_at(grad_starts, sample * H + head, D, V, BLOCK_D, BLOCK_V)
            tl.store(start, state_grad, mask=inside)
