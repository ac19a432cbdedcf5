"""Kernels of `linear_attention` that carry the state from chunk to chunk, forward and backward.

They do only that, because a sample's chunks wait for each other here; all other work is done per chunk, in
`triton_chunks`. A program handles one segment, one head, all D rows of the state and BLOCK_V of its columns,
and keeps them in registers. If samples have several segments, each segment is first summed from zeros
(`LOCAL`), and `combine_kernel` turns these sums into the states that the segments start from. With c the last
token of a chunk, g the sums of logarithms of decays, in base 2, from its first token on and S the state
before it, in float32:

    S'  = 2^g_c S + (k 2^(g_c - g))^T u       u = v, or with the delta rule values - key_answers S
    dS  = 2^g_c dS' + scale (q 2^g)^T do    and with the delta rule - key_answers^T du

Targets form separate chunks after a sample's last segment; they read the state and do not change it.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(pointer, row, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              FIRST):  # fmt: skip
    """Loads [C, BLOCK], the columns of a chunk's rows from FIRST on, with zeros outside."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = (row < count)[:, None] & (column < WIDTH)
    return tl.load(pointer + (row[:, None] * STRIDE + column), mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, value, row, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
               FIRST):  # fmt: skip
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = (row < count)[:, None] & (column < WIDTH)
    tl.store(pointer + (row[:, None] * STRIDE + column), value, mask=inside)


@triton.jit
def _segment(segments, chunks, number):
    """Reads a row of the segment table, with the first row of its tokens and the row after its history."""
    segment = segments + number * 4
    sample, first_chunk, num_history = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    exists = (sample >= 0) & (num_history > 0)
    first = chunks + first_chunk * 4
    last = first + (num_history - 1) * 4
    first_row = tl.load(first + 1, mask=exists, other=0)
    behind = tl.load(last + 1, mask=exists, other=0) + tl.load(last + 2, mask=exists, other=0)
    return sample, first_chunk, num_history, tl.load(segment + 3), first_row, behind


@triton.jit
def _state_at(pointer, index, FIRST, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_V: tl.constexpr):  # fmt: skip
    """Returns pointers to block [BLOCK_D, BLOCK_V] of state `index` from column FIRST on, and their mask."""
    d = tl.arange(0, BLOCK_D)[:, None]
    column = FIRST + tl.arange(0, BLOCK_V)[None, :]
    return pointer + index.to(tl.int64) * (D * V) + d * V + column, (d < D) & (column < V)


@triton.jit
def _decay_of_chunk(chunk_decays, index, D: tl.constexpr, BLOCK_D: tl.constexpr, PER_HEAD: tl.constexpr):
    """Loads g_c as [BLOCK_D, 1] or [1, 1]."""
    if PER_HEAD:
        decay = tl.load(chunk_decays + index + tl.zeros([1, 1], tl.int32))
    else:
        d = tl.arange(0, BLOCK_D)[:, None]
        decay = tl.load(chunk_decays + index * D + d, mask=d < D, other=0.0)
    return decay


@triton.jit
def _store_decay(decays, index, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[:, None]
    tl.store(decays + index * D + d, value + tl.zeros([BLOCK_D, 1], tl.float32), mask=d < D)


@triton.jit
def states_kernel(
    k, v, key_answers, chunk_decays, starts, chunks, segments, segment_offsets,
    states, final, added, ends, end_decays,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr,
    DELTA: tl.constexpr, LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes states [chunks, H, D, V], the state that each chunk reads, and final [B, H, D, V].

    k [T, H, D] has the factor 2^(g_c - g) already; with DELTA, u goes to added [T, H, V]. With LOCAL it
    starts from zeros and writes only ends [segments, H, D, V], the state after the segment, and end_decays
    [segments, H, D], the sum of its logarithms of decays; it writes nothing for a sample's last segment.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    FIRST = (tl.program_id(0) % BLOCKS) * BLOCK_V
    head = tl.program_id(0) // BLOCKS % H
    number = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    sample, first_chunk, num_history, num_target_chunks, first_row, behind = _segment(
        segments, chunks, number
    )
    if sample < 0:
        return
    is_last = number + 1 == tl.load(segment_offsets + sample + 1)
    row = tl.arange(0, C)
    if LOCAL:
        if is_last:
            return
        state = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        end_decay = tl.zeros([1 if PER_HEAD else BLOCK_D, 1], tl.float32)
    else:
        start, inside = _state_at(starts, number * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
        state = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, num_history):
        place = first_row + step * C
        count = tl.minimum(behind - place, C)
        token_head = place * H + head
        index = (first_chunk + step) * H + head
        block_v = load_rows(v + place * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, FIRST)
        keys = load_rows(k + token_head * D, row, count, H * D, D, BLOCK_D, 0)
        decay = _decay_of_chunk(chunk_decays, index, D, BLOCK_D, PER_HEAD)
        if not LOCAL:
            narrow = state.to(states.dtype.element_ty)
            pointer, inside = _state_at(states, index, FIRST, D, V, BLOCK_D, BLOCK_V)
            tl.store(pointer, narrow, mask=inside)
        if DELTA:
            answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
            answered = tl.dot(answer, narrow, input_precision=PRECISION)
            block_v = (block_v.to(tl.float32) - answered).to(keys.dtype)
            store_rows(added + token_head * V, block_v, row, count, H * V, V, BLOCK_V, FIRST)
        state = tl.dot(tl.trans(keys), block_v, state * tl.exp2(decay), input_precision=PRECISION)
        if LOCAL:
            end_decay += decay
    if LOCAL:
        pointer, inside = _state_at(ends, number * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
        tl.store(pointer, state, mask=inside)
        if FIRST == 0:
            _store_decay(end_decays, number * H + head, end_decay, D, BLOCK_D)
    else:
        for step in range(num_history, num_history + num_target_chunks):
            index = (first_chunk + step) * H + head
            pointer, inside = _state_at(states, index, FIRST, D, V, BLOCK_D, BLOCK_V)
            narrow = state.to(states.dtype.element_ty)
            tl.store(pointer, narrow, mask=inside)
            if DELTA:
                chunk = chunks + (first_chunk + step) * 4
                place, count = tl.load(chunk + 1), tl.load(chunk + 2)
                token_head = place * H + head
                block_v = load_rows(v + place * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V,
                                    FIRST)  # fmt: skip
                answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
                answered = tl.dot(answer, narrow, input_precision=PRECISION)
                block_v = (block_v.to(tl.float32) - answered).to(narrow.dtype)
                store_rows(added + token_head * V, block_v, row, count, H * V, V, BLOCK_V, FIRST)
        if is_last:
            pointer, inside = _state_at(final, sample * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
            tl.store(pointer, state, mask=inside)


@triton.jit
def combine_kernel(
    first, local, decays, segment_offsets, combined,
    STATE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Writes combined [segments, H, D, V], the state that each segment starts from.

    With REVERSE it is the gradient at each segment's end. `first` [B, H, D, V] is the value for the first
    segment (with REVERSE, the last one), `local` what a segment adds.

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
            value = value * tl.exp2(decay) + added


@triton.jit
def state_gradients_kernel(
    grad_out, q, k, scores, key_answers, chunk_decays, ends, chunks, segments, segment_offsets,
    state_grads, added_grads, grad_starts, local, end_decays,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr, LOCAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes state_grads [chunks, H, D, V], the gradient of the state after each history chunk.

    It also writes grad_starts [B, H, D, V].

    It processes a segment from its end, where the gradient is ends [segments, H, D, V] without what targets
    add to it. q [T, H, D] has the factor scale 2^g and k 2^(g_c - g) already. With DELTA, du goes to
    added_grads [T, H, V]. With LOCAL it starts from zeros and writes only `local` [segments, H, D, V],
    the gradient before the segment, and end_decays; it writes nothing for a sample's first segment.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    FIRST = (tl.program_id(0) % BLOCKS) * BLOCK_V
    head = tl.program_id(0) // BLOCKS % H
    number = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    sample, first_chunk, num_history, num_target_chunks, first_row, behind = _segment(
        segments, chunks, number
    )
    if sample < 0:
        return
    is_first = number == tl.load(segment_offsets + sample)
    row = tl.arange(0, C)
    if LOCAL:
        if is_first:
            return
        state_grad = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        end_decay = tl.zeros([1 if PER_HEAD else BLOCK_D, 1], tl.float32)
    else:
        end, inside = _state_at(ends, number * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
        state_grad = tl.load(end, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, num_target_chunks):
        chunk = chunks + (first_chunk + num_history + step) * 4
        place, count = tl.load(chunk + 1), tl.load(chunk + 2)
        token_head = place * H + head
        block_o = load_rows(grad_out + token_head * V, row, count, H * V, V, BLOCK_V, FIRST)
        queries = load_rows(q + token_head * D, row, count, H * D, D, BLOCK_D, 0)
        state_grad = tl.dot(tl.trans(queries), block_o, state_grad, input_precision=PRECISION)
        if DELTA:  # the score of a target with itself
            score = load_rows(scores + token_head * C, row, count, H * C, C, C, 0)
            added_grad = tl.dot(tl.trans(score), block_o, input_precision=PRECISION)
            store_rows(added_grads + token_head * V, added_grad, row, count, H * V, V, BLOCK_V, FIRST)
            answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
            narrow = added_grad.to(queries.dtype)
            state_grad -= tl.dot(tl.trans(answer), narrow, input_precision=PRECISION)
    for step in range(0, num_history):
        place = first_row + (num_history - 1 - step) * C
        count = tl.minimum(behind - place, C)
        token_head = place * H + head
        index = (first_chunk + num_history - 1 - step) * H + head
        block_o = load_rows(grad_out + token_head * V, row, count, H * V, V, BLOCK_V, FIRST)
        queries = load_rows(q + token_head * D, row, count, H * D, D, BLOCK_D, 0)
        decay = _decay_of_chunk(chunk_decays, index, D, BLOCK_D, PER_HEAD)
        if not LOCAL:
            narrow = state_grad.to(state_grads.dtype.element_ty)
            pointer, inside = _state_at(state_grads, index, FIRST, D, V, BLOCK_D, BLOCK_V)
            tl.store(pointer, narrow, mask=inside)
        if DELTA:
            score = load_rows(scores + token_head * C, row, count, H * C, C, C, 0)
            keys = load_rows(k + token_head * D, row, count, H * D, D, BLOCK_D, 0)
            answer = load_rows(key_answers + token_head * D, row, count, H * D, D, BLOCK_D, 0)
            added_grad = tl.dot(tl.trans(score), block_o, input_precision=PRECISION)
            added_grad = tl.dot(keys, narrow, added_grad, input_precision=PRECISION)
            narrow_added = added_grad.to(queries.dtype)
            store_rows(added_grads + token_head * V, narrow_added, row, count, H * V, V, BLOCK_V, FIRST)
        state_grad = tl.dot(
            tl.trans(queries), block_o, state_grad * tl.exp2(decay), input_precision=PRECISION
        )
        if DELTA:
            state_grad -= tl.dot(tl.trans(answer), narrow_added, input_precision=PRECISION)
        if LOCAL:
            end_decay += decay
    if LOCAL:
        pointer, inside = _state_at(local, number * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
        tl.store(pointer, state_grad, mask=inside)
        if FIRST == 0:
            _store_decay(end_decays, number * H + head, end_decay, D, BLOCK_D)
    else:
        if is_first:
            start, inside = _state_at(grad_starts, sample * H + head, FIRST, D, V, BLOCK_D, BLOCK_V)
            tl.store(start, state_grad, mask=inside)
