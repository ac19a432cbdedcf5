"""Kernels of `linear_attention`: some carry the state from chunk to chunk, some work on each chunk alone.

The first kernels carry the state from chunk to chunk. They do only that, because a sample's chunks wait for
each other here; all other work is done per chunk. A program handles one segment, one head, all D rows of the
state and BLOCK_V of its columns, and keeps them in registers. If samples have several segments, each segment
is first summed from zeros (`LOCAL`), and `combine_kernel` turns these sums into the states that the segments
start from. With c the last token of a chunk, g the sums of logarithms of decays, in base 2, from its first
token on and S the state before it, in float32:

    S'  = 2^g_c S + (k 2^(g_c - g))^T u       u = v, or with the delta rule values - key_answers S
    dS  = 2^g_c dS' + scale (q 2^g)^T do    and with the delta rule - key_answers^T du

Targets form separate chunks after a sample's last segment; they read the state and do not change it.

The other kernels work on each chunk, given the states between chunks. Between tokens i > j of a chunk a key
decays by 2^(g_i - g_j), where g sums the logarithms of decays, in base 2, from the chunk's first token on.
The two factors 2^g_i and 2^-g_j would overflow, so the pairs are split hierarchically: at level l the chunk
is divided into blocks of 2^(l + 1) tokens, and a pair whose tokens lie in different halves of one block is
anchored at the first token a of the second half, 2^(g_i - g_a) 2^(g_a - g_j). Neither exponent is positive if
no decay exceeds 1. Each pair i > j belongs to exactly one level, so a chunk of C tokens takes log2(C) matrix
products; the diagonal has no decay.

Where decays are weak enough, as in most models, both factors stay finite with one anchor for all pairs of a
chunk, or of a quarter of it (`_large_blocks`). One product then replaces all lower levels.

Any number may stand for g_a, as long as both factors use it. Operands of 16 bits take the nearest integer:
another anchor then multiplies a factor by a power of two, so that q 2^(g_i - g_a) and k 2^(g_a - g_j) are
rounded alike in all products, and pairs cancel exactly in the gradients of decays (`_as_rounded`). Operands
of 32 bits come with g in float64: a small difference of large sums would have the rounding of the sums.

The delta rule needs (I + M)^-1 with M_ij = beta_i k_i k_j 2^(g_i - g_j) for i > j. The same levels compute
it: the inverses of a block's halves give the inverse of the block, which is as stable as substitution.

Programs process columns in blocks, so that they need few registers.
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


MAX_EXPONENT, MAX_EXPONENT_OF_HALF = tl.constexpr(60.0), tl.constexpr(8.0)
"""All pairs of a block may share an anchor if no factor exceeds 2 to this power; the second for float16."""

TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""A float32 number that is added and subtracted rounds numbers up to 2^22 to integers: faster than `rint`."""


@triton.jit
def _load_sums(sums, row, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST,
               PER_HEAD: tl.constexpr, KEPT: tl.constexpr = False):  # fmt: skip
    """Loads g of existing rows of the chunk: [C, BLOCK_D], or [C, 1] with one decay per head. The caches drop
    it last if it is kept."""
    POLICY: tl.constexpr = "evict_last" if KEPT else ""
    if PER_HEAD:
        g = tl.load(sums + row[:, None] * STRIDE, eviction_policy=POLICY)
    else:
        column = FIRST + tl.arange(0, BLOCK_D)[None, :]
        pointer = sums + (row[:, None] * STRIDE + column)
        g = tl.load(pointer, mask=column < D, other=0.0, eviction_policy=POLICY)
    return g


@triton.jit
def _load_anchor(sums, row, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST):
    """Loads g of anchors, rounded to integers unless g is float64."""
    g = _load_sums(sums, row, STRIDE, D, BLOCK_D, FIRST, False)
    if g.dtype == tl.float32:
        g = (g + TO_INTEGER) - TO_INTEGER
    return g


@triton.jit
def _load_last(sums, count, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST,
               PER_HEAD: tl.constexpr):  # fmt: skip
    """Loads g of the chunk's last token: [1, BLOCK_D] or [1, 1]."""
    row = (count - 1).to(tl.int32) + tl.zeros([1], tl.int32)
    return _load_sums(sums, row, STRIDE, D, BLOCK_D, FIRST, PER_HEAD)


@triton.jit
def _near_factors(g):
    """Returns 2^(g - a) and 2^(a - g) for the integer a next to each g; ones if g is float64."""
    down = tl.full(g.shape, 1.0, tl.float32)
    up = down
    if g.dtype == tl.float32:
        distance = g - ((g + TO_INTEGER) - TO_INTEGER)
        down, up = tl.exp2(distance), tl.exp2(-distance)
    return down, up


@triton.jit
def _as_rounded(x, factor, inverse):
    """Returns x in float32 with the rounding error of x times the factor, or the factor times any 2^n."""
    return (x * factor).to(x.dtype).to(tl.float32) * inverse


@triton.jit
def _decays_of_pairs(sums, row, STRIDE: tl.constexpr, C: tl.constexpr):
    """Returns 2^(g_i - g_j) for tokens j < i and 0 for other pairs, [C, C], with one decay per head."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    of_rows, of_columns = tl.load(sums + row * STRIDE)[:, None], tl.load(sums + row * STRIDE)[None, :]
    difference = (of_rows - of_columns).to(tl.float32)
    return tl.where(i > j, tl.exp2(tl.where(i > j, difference, 0.0)), 0.0)


@triton.jit
def _factor(g, sums, row, last_row, level, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
            FIRST):  # fmt: skip
    """Returns the decay between each row and its anchor at a level, in the shape of g."""
    anchor = tl.minimum(((row >> level) | 1) << level, last_row)
    at_anchor = _load_anchor(sums, anchor, STRIDE, D, BLOCK_D, FIRST)
    sign = tl.where((row >> level) & 1 == 1, 1.0, -1.0)[:, None]
    return tl.exp2((g - at_anchor).to(tl.float32) * sign)


@triton.jit
def _large_blocks(g, sums, row, last_row, TYPE: tl.constexpr, LEVELS: tl.constexpr, STRIDE: tl.constexpr,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST):  # fmt: skip
    """Returns the level whose blocks can anchor all decays at their middle token, and g's distance to it.

    The level is LEVELS or LEVELS - 2, or 0 if decays are too strong for either. TYPE is that of the products.
    """
    LIMIT: tl.constexpr = MAX_EXPONENT_OF_HALF if TYPE == tl.float16 else MAX_EXPONENT
    level = tl.full([], LEVELS, tl.int32)
    distance = _distance_to_middle(g, sums, row, last_row, level, STRIDE, D, BLOCK_D, FIRST)
    if tl.max(tl.max(tl.abs(distance), 1), 0) > LIMIT:
        level -= 2
        distance = _distance_to_middle(g, sums, row, last_row, level, STRIDE, D, BLOCK_D, FIRST)
        if tl.max(tl.max(tl.abs(distance), 1), 0) > LIMIT:
            level = tl.zeros([], tl.int32)
    return level, distance


@triton.jit
def _distance_to_middle(g, sums, row, last_row, level, STRIDE: tl.constexpr, D: tl.constexpr,
                        BLOCK_D: tl.constexpr, FIRST):  # fmt: skip
    middle = tl.minimum(((row >> level) << level) + ((1 << level) >> 1), last_row)
    return (g - _load_anchor(sums, middle, STRIDE, D, BLOCK_D, FIRST)).to(tl.float32)


@triton.jit
def _pairs_within(C: tl.constexpr, level):
    """Returns a mask [C, C], true for pairs of tokens j < i in one block."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return ((i ^ j) >> level == 0) & (i > j)


@triton.jit
def _pairs_of_level(C: tl.constexpr, level):
    """Returns a mask [C, C], true for pairs with i in the second and j in the first half of one block."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return ((i ^ j) >> level == 1) & (i > j)


@triton.jit
def _inverse(below, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Computes (I + below)^-1, float32 [C, C], for a matrix with zeros on and above the diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for level in range(LEVELS):
        corner = tl.where(_pairs_of_level(C, level), below, 0.0)
        corner = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse


@triton.jit
def _load_state(states, index, FIRST_D, FIRST_V, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_V: tl.constexpr, exists=True):  # fmt: skip
    """Loads a block [BLOCK_D, BLOCK_V] of state `index`, with zeros outside the state or if none exists."""
    d = FIRST_D + tl.arange(0, BLOCK_D)[:, None]
    column = FIRST_V + tl.arange(0, BLOCK_V)[None, :]
    pointer = states + index.to(tl.int64) * (D * V) + d * V + column
    return tl.load(pointer, mask=(d < D) & (column < V) & exists, other=0.0)


@triton.jit
def decay_sums_kernel(
    log_decay, chunks, sums,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes sums [T, COLUMNS] in their type: `log_decay` in base 2, summed from each chunk's first token on.

    Targets are not summed.

    One program per chunk and BLOCK columns, columns fastest.
    """
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    chunk = chunks + (tl.program_id(0) // BLOCKS).to(tl.int64) * 4
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    row = tl.arange(0, C)[:, None]
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < COLUMNS)
    value = tl.load(log_decay + (first_row + row) * STRIDE + column, mask=inside, other=0.0)
    value = value.to(sums.dtype.element_ty) * 1.4426950408889634
    if is_target == 0:
        value = tl.cumsum(value, 0)
    tl.store(sums + (first_row + row) * COLUMNS + column, value, mask=inside)


@triton.jit(do_not_specialize=["scale"])
def prepare_kernel(
    q, k, v, beta, sums, chunks,
    scores, decayed_q, remaining_k, chunk_decays, inverses, key_answers, values, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes scores [T, H, C], the scaled q_i k_j 2^(g_i - g_j) for j <= i; decayed_q [T, H, D], scale q
    2^g; remaining_k [T, H, D], k 2^(g_c - g); and chunk_decays [chunks, H, D] or [chunks, H], g_c.

    With DELTA it also writes inverses float32 [T, H, C], X = (I + M)^-1; key_answers [T, H, D],
    X (beta k 2^g), through which the state before the chunk changes the values that its tokens add; and
    values [T, H, V], X (beta v). One program per chunk and head.
    """
    number = (tl.program_id(0) // H).to(tl.int64)
    chunk = chunks + number * 4
    head = tl.program_id(0) % H
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 0:
        return
    row = tl.arange(0, C)
    existing = tl.minimum(row, count - 1).to(tl.int32)
    i, j = row[:, None], row[None, :]
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    token_head = first_row * H + head
    sums += token_head * G_WIDTH
    score, overlap = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    on_diagonal = tl.zeros([C], tl.float32)
    for first in range(0, D, BLOCK_D):
        queries = load_rows(q + first_row * STRIDE_Q + head * HEAD_Q, row, count, STRIDE_Q, D, BLOCK_D, first)
        keys = load_rows(k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D, BLOCK_D, first)
        g = _load_sums(sums, existing, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD)
        last = _load_last(sums, count, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD)
        if PER_HEAD:
            tl.store(chunk_decays + number * H + head + tl.zeros([1, 1], tl.int32), last)
        else:
            d = first + tl.arange(0, BLOCK_D)[None, :]
            tl.store(chunk_decays + (number * H + head) * D + d, last, mask=d < D)
        decayed = queries.to(tl.float32) * tl.exp2(g.to(tl.float32)) * scale
        store_rows(decayed_q + token_head * D, decayed, row, count, H * D, D, BLOCK_D, first)
        on_diagonal += tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
        if is_target == 0:
            remaining = keys.to(tl.float32) * tl.exp2((last - g).to(tl.float32))
            store_rows(remaining_k + token_head * D, remaining, row, count, H * D, D, BLOCK_D, first)
            if PER_HEAD:
                score = tl.dot(queries, tl.trans(keys), score, input_precision=PRECISION)
                if DELTA:
                    overlap = tl.dot(keys, tl.trans(keys), overlap, input_precision=PRECISION)
            else:
                blocks, distance = _large_blocks(
                    g, sums, row, count - 1, keys.dtype, LEVELS, H * D, D, BLOCK_D, first
                )
                if blocks > 0:
                    pairs = _pairs_within(C, blocks)
                    down, up = tl.exp2(distance), tl.exp2(-distance)
                    scaled_q, scaled_k = (queries * down).to(keys.dtype), (keys * up).to(keys.dtype)
                    product = tl.dot(scaled_q, tl.trans(scaled_k), input_precision=PRECISION)
                    score += tl.where(pairs, product, 0.0)
                    if DELTA:
                        rows = (keys * down).to(keys.dtype)
                        product = tl.dot(rows, tl.trans(scaled_k), input_precision=PRECISION)
                        overlap += tl.where(pairs, product, 0.0)
                for level in range(blocks, LEVELS):
                    factor = _factor(g, sums, row, count - 1, level, H * D, D, BLOCK_D, first)
                    pairs = _pairs_of_level(C, level)
                    scaled_q, scaled_k = (queries * factor).to(keys.dtype), (keys * factor).to(keys.dtype)
                    product = tl.dot(scaled_q, tl.trans(scaled_k), input_precision=PRECISION)
                    score += tl.where(pairs, product, 0.0)
                    if DELTA:
                        product = tl.dot(scaled_k, tl.trans(scaled_k), input_precision=PRECISION)
                        overlap += tl.where(pairs, product, 0.0)
    if PER_HEAD:
        decays = _decays_of_pairs(sums, existing, H, C)
        score *= decays
        overlap *= decays
    score = tl.where(i == j, on_diagonal[:, None], score) * scale
    store_rows(scores + token_head * C, score, row, count, H * C, C, C, 0)
    if DELTA:
        weight = tl.load(beta + (first_row + row) * H + head, mask=row < count, other=0.0).to(tl.float32)
        inverse = tl.where(i == j, 1.0, 0.0)
        if is_target == 0:
            inverse = _inverse(weight[:, None] * overlap, C, LEVELS, PRECISION)
        store_rows(inverses + token_head * C, inverse, row, count, H * C, C, C, 0)
        inverse = inverse.to(k.dtype.element_ty)
        for first in range(0, D, BLOCK_D):
            keys = load_rows(
                k + first_row * STRIDE_K + head * HEAD_K, row, count, STRIDE_K, D, BLOCK_D, first
            )
            g = _load_sums(sums, existing, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD)
            decay = tl.exp2(g.to(tl.float32))
            weighted = (weight[:, None] * keys.to(tl.float32) * decay).to(keys.dtype)
            answer = tl.dot(inverse, weighted, input_precision=PRECISION)
            store_rows(key_answers + token_head * D, answer, row, count, H * D, D, BLOCK_D, first)
        for first in range(0, V, BLOCK_V):
            block_v = load_rows(
                v + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, first
            )
            block_v = (weight[:, None] * block_v.to(tl.float32)).to(block_v.dtype)
            added = tl.dot(inverse, block_v, input_precision=PRECISION)
            store_rows(values + token_head * V, added, row, count, H * V, V, BLOCK_V, first)


@triton.jit
def out_kernel(
    decayed_q, scores, added, states, chunks, out,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out [T, H, V] = decayed_q S + scores u. One program per chunk, head and BLOCK_V columns.

    `added` [T, H, V] is u, which has the strides of v; states [chunks, H, D, V] is S.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    FIRST = (tl.program_id(0) % BLOCKS) * BLOCK_V
    head = tl.program_id(0) // BLOCKS % H
    number = (tl.program_id(0) // (BLOCKS * H)).to(tl.int64)
    first_row, count = tl.load(chunks + number * 4 + 1), tl.load(chunks + number * 4 + 2)
    if count == 0:
        return
    row = tl.arange(0, C)
    token_head = first_row * H + head
    score = load_rows(scores + token_head * C, row, count, H * C, C, C, 0)
    block_v = load_rows(added + first_row * STRIDE_V + head * HEAD_V, row, count, STRIDE_V, V, BLOCK_V, FIRST)
    queries = load_rows(decayed_q + token_head * D, row, count, H * D, D, BLOCK_D, 0)
    state = _load_state(states, number * H + head, 0, FIRST, D, V, BLOCK_D, BLOCK_V)
    result = tl.dot(queries, state, input_precision=PRECISION)
    result = tl.dot(score, block_v, result, input_precision=PRECISION)
    store_rows(out + token_head * V, result, row, count, H * V, V, BLOCK_V, FIRST)


@triton.jit(do_not_specialize=["scale"])
def value_gradients_kernel(
    grad_out, v, beta, chunks, scores, remaining_k, inverses, added, added_grads, state_grads,
    grad_v, score_grads, overlap_grads, beta_grads, scale,
    STRIDE_V: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes grad_v, contiguous, and score_grads [T, H, C], the gradient of each scaled score.

    With DELTA, added and added_grads [T, H, V] are u and its gradient; it then also writes overlap_grads
    float32 [T, H, C], the gradient of M without beta, and beta_grads float32 [T, H], what values add to the
    gradient of beta. One program per chunk and head.
    """
    number = (tl.program_id(0) // H).to(tl.int64)
    chunk = chunks + number * 4
    head = tl.program_id(0) % H
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 0:
        return
    row = tl.arange(0, C)
    token_head = first_row * H + head
    state_index = number * H + head
    v += first_row * STRIDE_V + head * HEAD_V
    grad_out += token_head * V
    score_grad = tl.zeros([C, C], tl.float32)
    if DELTA:
        weight = tl.load(beta + (first_row + row) * H + head, mask=row < count, other=0.0).to(tl.float32)
        inverse = load_rows(inverses + token_head * C, row, count, H * C, C, C, 0)
        turned = tl.trans(inverse).to(v.dtype.element_ty)
        beta_grad = tl.zeros([C], tl.float32)
        overlap_grad = tl.zeros([C, C], tl.float32)
    else:
        turned = tl.trans(load_rows(scores + token_head * C, row, count, H * C, C, C, 0))
    for first in range(0, V, BLOCK_V):
        block_o = load_rows(grad_out, row, count, H * V, V, BLOCK_V, first)
        original = load_rows(v, row, count, STRIDE_V, V, BLOCK_V, first)
        if DELTA:
            block_v = load_rows(added + token_head * V, row, count, H * V, V, BLOCK_V, first)
            added_grad = load_rows(added_grads + token_head * V, row, count, H * V, V, BLOCK_V, first)
            wanted = tl.dot(turned, added_grad, input_precision=PRECISION)
            beta_grad += tl.sum(wanted * original.to(tl.float32), 1)
            overlap_grad -= tl.dot(wanted.to(block_v.dtype), tl.trans(block_v), input_precision=PRECISION)
            value_grad = weight[:, None] * wanted
        else:
            block_v = original
            value_grad = tl.dot(turned, block_o, input_precision=PRECISION)
            if is_target == 0:
                for first_d in range(0, D, BLOCK_D):
                    remaining = load_rows(
                        remaining_k + token_head * D, row, count, H * D, D, BLOCK_D, first_d
                    )
                    state_grad = _load_state(state_grads, state_index, first_d, first, D, V, BLOCK_D, BLOCK_V)
                    value_grad = tl.dot(remaining, state_grad, value_grad, input_precision=PRECISION)
        store_rows(grad_v + token_head * V, value_grad, row, count, H * V, V, BLOCK_V, first)
        score_grad += tl.dot(block_o, tl.trans(block_v), input_precision=PRECISION)
    store_rows(score_grads + token_head * C, score_grad * scale, row, count, H * C, C, C, 0)
    if DELTA:
        store_rows(overlap_grads + token_head * C, overlap_grad, row, count, H * C, C, C, 0)
        tl.store(beta_grads + (first_row + row) * H + head, beta_grad, mask=row < count)


@triton.jit(do_not_specialize=["scale"])
def key_gradients_kernel(
    grad_out, q, k, v, beta, sums, chunks, inverses, added, added_grads, states, state_grads,
    score_grads, overlap_grads, beta_grads, grad_q, grad_k, grad_decay, grad_beta, scale,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PER_HEAD: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of q, k, decays and, with DELTA, beta, contiguous.

    One program per chunk and head.

    states and state_grads [chunks, H, D, V] are S before the chunk and the gradient of S after it.
    `value_gradients_kernel` has written score_grads, overlap_grads and beta_grads.

    A score s_ij 2^(g_i - g_j) adds the score times its gradient to the gradient of g_i and subtracts it from
    that of g_j. The gradient of g is therefore q dq - k dk, summed over columns if a head has one decay, with
    q and k as the products have rounded them: the gradient of a decay sums those of all later g, where pairs
    of later tokens must cancel.
    """
    number = (tl.program_id(0) // H).to(tl.int64)
    chunk = chunks + number * 4
    head = tl.program_id(0) % H
    first_row, count, is_target = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    if count == 0:
        return
    row = tl.arange(0, C)
    existing = tl.minimum(row, count - 1).to(tl.int32)
    i, j = row[:, None], row[None, :]
    G_WIDTH: tl.constexpr = 1 if PER_HEAD else D
    token_head = first_row * H + head
    state_index = number * H + head
    sums += token_head * G_WIDTH
    q += first_row * STRIDE_Q + head * HEAD_Q
    k += first_row * STRIDE_K + head * HEAD_K
    v += first_row * STRIDE_V + head * HEAD_V
    grad_out += token_head * V

    score_grad = load_rows(score_grads + token_head * C, row, count, H * C, C, C, 0)
    on_diagonal = tl.sum(tl.where(i == j, score_grad.to(tl.float32), 0.0), 1)[:, None]
    if DELTA:
        weight = tl.load(beta + (first_row + row) * H + head, mask=row < count, other=0.0).to(tl.float32)
        beta_grad = tl.load(beta_grads + (first_row + row) * H + head, mask=row < count, other=0.0)
        inverse = load_rows(inverses + token_head * C, row, count, H * C, C, C, 0)
        turned = tl.trans(inverse).to(k.dtype.element_ty)
    head_grad, head_chunk_grad = tl.zeros([C], tl.float32), 0.0

    for first in range(0, D, BLOCK_D):
        query_grad, key_grad = tl.zeros([C, BLOCK_D], tl.float32), tl.zeros([C, BLOCK_D], tl.float32)
        answer_grad = tl.zeros([C, BLOCK_D], tl.float32)
        end_grad = tl.zeros([BLOCK_D], tl.float32)
        # All loads come first, so that the program waits for memory once.
        queries = load_rows(q, row, count, STRIDE_Q, D, BLOCK_D, first)
        keys = load_rows(k, row, count, STRIDE_K, D, BLOCK_D, first)
        g = _load_sums(sums, existing, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD)
        for first_v in range(0, V, BLOCK_V):
            block_o = load_rows(grad_out, row, count, H * V, V, BLOCK_V, first_v)
            if DELTA:
                block_v = load_rows(added + token_head * V, row, count, H * V, V, BLOCK_V, first_v)
                added_grad = load_rows(added_grads + token_head * V, row, count, H * V, V, BLOCK_V, first_v)
            else:
                block_v = load_rows(v, row, count, STRIDE_V, V, BLOCK_V, first_v)
            state = _load_state(states, state_index, first, first_v, D, V, BLOCK_D, BLOCK_V)
            state_grad = _load_state(state_grads, state_index, first, first_v, D, V, BLOCK_D, BLOCK_V,
                                     is_target == 0)  # fmt: skip
            query_grad = tl.dot(block_o, tl.trans(state), query_grad, input_precision=PRECISION)
            key_grad = tl.dot(block_v, tl.trans(state_grad), key_grad, input_precision=PRECISION)
            if DELTA:
                answer_grad = tl.dot(added_grad, tl.trans(state), answer_grad, input_precision=PRECISION)
            end_grad += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), 1)
        if DELTA:
            # Keys' gradients as rows and as columns stay apart: their signs in the gradient of g differ.
            row_grad = -tl.dot(turned, answer_grad.to(k.dtype.element_ty), input_precision=PRECISION)
        last = _load_last(sums, count, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD)
        chunk_grad = end_grad[None, :] * tl.exp2(last.to(tl.float32))
        if PER_HEAD:
            anchor = g
            is_near = True
        else:
            middle = tl.minimum(C // 2, count - 1).to(tl.int32) + tl.zeros([1], tl.int32)
            anchor = _load_anchor(sums, middle, H * G_WIDTH, D, BLOCK_D, first)
            LIMIT: tl.constexpr = MAX_EXPONENT_OF_HALF if k.dtype.element_ty == tl.float16 else MAX_EXPONENT
            is_near = (is_target == 0) & (tl.max(tl.max(tl.abs(g - anchor), 1), 0) <= LIMIT)
        if is_near:
            # 2^g = 2^anchor 2^(g - anchor): gradients are summed without the second factor.
            scaled_q, scaled_k, rows = queries, keys, keys
            if not PER_HEAD:
                down, up = tl.exp2((g - anchor).to(tl.float32)), tl.exp2((anchor - g).to(tl.float32))
                scaled_q, scaled_k = (queries * down).to(keys.dtype), (keys * up).to(keys.dtype)
                rows = (keys * down).to(keys.dtype)
            query_grad *= tl.exp2(anchor.to(tl.float32)) * scale
            key_grad *= tl.exp2((last - anchor).to(tl.float32))
            chunk_grad += tl.sum(scaled_k.to(tl.float32) * key_grad, 0)[None, :]
            pairs = i > j
            of_pairs = tl.where(pairs & (is_target == 0), score_grad, 0.0)
            if PER_HEAD:
                of_pairs = (of_pairs * _decays_of_pairs(sums, existing, H, C)).to(keys.dtype)
            query_grad = tl.dot(of_pairs, scaled_k, query_grad, input_precision=PRECISION)
            key_grad = tl.dot(tl.trans(of_pairs), scaled_q, key_grad, input_precision=PRECISION)
            decay_grad = scaled_q.to(tl.float32) * query_grad
            if DELTA:
                row_grad *= tl.exp2(anchor.to(tl.float32))
                beta_grad += tl.sum(rows.to(tl.float32) * row_grad, 1)
                chosen = load_rows(overlap_grads + token_head * C, row, count, H * C, C, C, 0)
                chosen = tl.where(pairs & (is_target == 0), chosen, 0.0)
                if PER_HEAD:
                    chosen *= _decays_of_pairs(sums, existing, H, C)
                overlap = tl.dot(rows, tl.trans(scaled_k), input_precision=PRECISION)
                beta_grad += tl.sum(tl.where(pairs, overlap * chosen, 0.0), 1)
                chosen = (weight[:, None] * chosen).to(keys.dtype)
                row_grad = tl.dot(chosen, scaled_k, weight[:, None] * row_grad, input_precision=PRECISION)
                key_grad = tl.dot(tl.trans(chosen), rows, key_grad, input_precision=PRECISION)
                decay_grad += rows.to(tl.float32) * row_grad
            decay_grad -= scaled_k.to(tl.float32) * key_grad
            if not PER_HEAD:
                query_grad *= down
                key_grad *= up
                if DELTA:
                    row_grad *= down
            if DELTA:
                key_grad += row_grad
        else:
            decay = tl.exp2(g.to(tl.float32))
            query_grad *= decay * scale
            if is_target == 0:
                key_grad *= tl.exp2((last - g).to(tl.float32))
                down, up = _near_factors(g)
                chunk_grad += tl.sum(_as_rounded(keys, up, down) * key_grad, 0)[None, :]
            if DELTA:
                row_grad *= decay
                beta_grad += tl.sum(keys.to(tl.float32) * row_grad, 1)
                row_grad *= weight[:, None]
                overlap_grad = load_rows(overlap_grads + token_head * C, row, count, H * C, C, C, 0)
            if is_target == 0:
                blocks, distance = _large_blocks(
                    g, sums, row, count - 1, keys.dtype, LEVELS, H * G_WIDTH, D, BLOCK_D, first
                )
                if blocks > 0:
                    pairs = _pairs_within(C, blocks)
                    of_pairs = tl.where(pairs, score_grad, 0.0)
                    down, up = tl.exp2(distance), tl.exp2(-distance)
                    scaled_q, scaled_k = (queries * down).to(keys.dtype), (keys * up).to(keys.dtype)
                    query_grad += down * tl.dot(of_pairs, scaled_k, input_precision=PRECISION)
                    key_grad += up * tl.dot(tl.trans(of_pairs), scaled_q, input_precision=PRECISION)
                    if DELTA:
                        rows = (keys * down).to(keys.dtype)
                        overlap = tl.dot(rows, tl.trans(scaled_k), input_precision=PRECISION)
                        chosen = tl.where(pairs, overlap_grad, 0.0)
                        beta_grad += tl.sum(tl.where(pairs, overlap * chosen, 0.0), 1)
                        chosen = (weight[:, None] * chosen).to(keys.dtype)
                        row_grad += down * tl.dot(chosen, scaled_k, input_precision=PRECISION)
                        key_grad += up * tl.dot(tl.trans(chosen), rows, input_precision=PRECISION)
                for level in range(blocks, LEVELS):
                    factor = _factor(g, sums, row, count - 1, level, H * G_WIDTH, D, BLOCK_D, first)
                    pairs = _pairs_of_level(C, level)
                    of_pairs = tl.where(pairs, score_grad, 0.0)
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
            # Loads g again, by another policy lest the compiler keeps the first: the products need its
            # registers.
            g = _load_sums(sums, existing, H * G_WIDTH, D, BLOCK_D, first, PER_HEAD, True)
            down, up = _near_factors(g)
            decay_grad = _as_rounded(queries, down, up) * query_grad - _as_rounded(keys, up, down) * key_grad
            if DELTA:
                decay_grad += _as_rounded(keys, down, up) * row_grad
                key_grad += row_grad
        query_grad += on_diagonal * keys.to(tl.float32)
        key_grad += on_diagonal * queries.to(tl.float32)
        store_rows(grad_q + token_head * D, query_grad, row, count, H * D, D, BLOCK_D, first)
        store_rows(grad_k + token_head * D, key_grad, row, count, H * D, D, BLOCK_D, first)
        if PER_HEAD:
            head_grad += tl.sum(decay_grad, 1)
            head_chunk_grad += tl.sum(chunk_grad)
        else:
            if is_target == 0:
                decay_grad = tl.cumsum(decay_grad, 0, reverse=True) + chunk_grad
            store_rows(grad_decay + token_head * D, decay_grad, row, count, H * D, D, BLOCK_D, first)
    if PER_HEAD:
        if is_target == 0:
            head_grad = tl.cumsum(head_grad, 0, reverse=True) + head_chunk_grad
        tl.store(grad_decay + token_head + row * H, head_grad, mask=row < count)
    if DELTA:
        tl.store(grad_beta + (first_row + row) * H + head, beta_grad, mask=row < count)
