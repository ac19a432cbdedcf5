"""Computes dQ on Hopper by tiles of rows: programs share no sums, so the result is bitwise repeatable.

Formulas and names are those of `backward`, the schedule is that of `forward`: a tile is cut into strips of 64
rows, one per warp group, and visits the blocks of keys that it sees. The scores and dO V^T of a block are
started together. The slopes are computed while the tensor cores work on the second product and on the other
strip, and dS is the left operand of dQ += dS K in registers. If it fits, dQ leaves through a buffer of its
own, so that the next rows arrive during the last product and the stores; otherwise it leaves through the
buffer of q.

    buffers   q, g (dO), k, v, slots for places in the list, out
    barriers  rows full and free, k full and free, v full and free, published
    SIZES     D, BLOCK_N, stages of k, stages of v, APART: whether dQ has a buffer of its own
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recsys.ops.hstu_attention.hopper.backward import VARYING, fetch
from recsys.ops.hstu_attention.hopper.forward import block_at, blocks_past, num_blocks, num_masked, visible
from recsys.ops.runtime.gluon_pieces import (
    STRIP,
    init_barriers,
    init_rings,
    load_rows,
    new_barriers,
    new_buffers,
    new_ring,
    new_slots,
    next_stage,
    opaque,
    publish,
    read_slot,
    store_rows,
    tanh,
)

STRIPS = gl.constexpr(2)
"""Strips per tile."""


@gluon.jit
def loading_warp(
    q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads, strides,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Takes tiles in the order of the list, one after the other, and loads their operands."""
    BLOCK_N: gl.constexpr = SIZES[1]
    q_buffer, g_buffer, k_buffer, v_buffer, slots = buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]
    rows_full, rows_free, k_full, k_free, v_full, v_free, published = barriers
    stride_q, stride_g, stride_k, stride_v = strides
    k_cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    v_cursor = (gl.to_tensor(0), gl.to_tensor(1))
    turn = gl.to_tensor(0)
    place = gl.program_id(0)
    while place < num_places:
        tile, runs, unmasked, head = fetch(items, place, num_heads)
        following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        count = num_blocks(runs)
        if count > 0:
            publish(
                place, slots.index(turn % 2)
            )  # the tile two before has been read: its stores were waited for
            mbarrier.arrive(published.index(turn % 2))
            for number in range(count):
                first = block_at(number, runs, unmasked) * BLOCK_N
                stage, parity = k_cursor
                mbarrier.wait(k_free.index(stage), parity)
                load_rows(k_desc, tile, first, head * stride_k, k_full.index(stage), k_buffer.index(stage))
                if number == 0:
                    for strip in gl.static_range(STRIPS):
                        full, row = rows_full.index(strip), tile[3] + strip * STRIP
                        mbarrier.wait(rows_free.index(strip), turn % 2 ^ 1)
                        load_rows(q_desc, tile, row, head * stride_q, full, q_buffer.index(strip))
                        load_rows(g_desc, tile, row, head * stride_g, full, g_buffer.index(strip))
                stage, parity = v_cursor
                mbarrier.wait(v_free.index(stage), parity)
                load_rows(v_desc, tile, first, head * stride_v, v_full.index(stage), v_buffer.index(stage))
                k_cursor = next_stage(k_cursor, SIZES[2])
                v_cursor = next_stage(v_cursor, SIZES[3])
            turn += 1
        place = following
    publish(place, slots.index(turn % 2))
    mbarrier.arrive(published.index(turn % 2))


@gluon.jit
def add_block(
    total, i, first, last, k_cursor, v_cursor, buffers, barriers, strip: gl.constexpr, tile, half_alpha,
    rule, SIZES: gl.constexpr, RULE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the contribution of the block of keys from `first` on to `total`, dQ of the rows `i` of a strip.
    `last`: whether this is the last block of the tile."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    place = opaque(strip)
    q = buffers[0].index(place).reshape([STRIP, D])
    g = buffers[1].index(place).reshape([STRIP, D])
    k = buffers[2].index(k_cursor[0]).reshape([BLOCK_N, D])
    v = buffers[3].index(opaque(v_cursor[0])).reshape([BLOCK_N, D])
    dtype: gl.constexpr = q.dtype
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)

    mbarrier.wait(barriers[2].index(k_cursor[0]), k_cursor[1])
    score = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(barriers[4].index(v_cursor[0]), v_cursor[1])
    grad = warpgroup_mma(g, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    x = score * half_alpha
    if MASKED:
        j = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        seen = visible(gl.expand_dims(i, 1), gl.expand_dims(j, 0), tile[2], rule, RULE)
    t = tanh(x)
    u = t + 1.0
    slope = u * (x - x * t) + u
    if MASKED:
        slope = gl.where(seen, slope, 0.0)
    # The keys have already arrived. Without this wait the assembler would compute the slopes behind the next
    # one.
    mbarrier.wait(barriers[2].index(k_cursor[0]), k_cursor[1])
    grad, slope = warpgroup_mma_wait(0, deps=(grad, slope))
    mbarrier.arrive(barriers[5].index(v_cursor[0]))
    if SIZES[4]:
        mbarrier.arrive(barriers[1].index(strip), pred=last)
    rounded = gl.convert_layout((grad * slope).to(dtype), operand)
    total = warpgroup_mma(rounded, k, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(barriers[3].index(k_cursor[0]))
    return total


@gluon.jit
def skip_blocks(count, k_cursor, v_cursor, barriers, SIZES: gl.constexpr):
    """Frees the buffers of `count` blocks without reading them, and returns the cursors behind these
    blocks."""
    for _number in range(count):
        mbarrier.wait(barriers[2].index(k_cursor[0]), k_cursor[1])
        mbarrier.arrive(barriers[3].index(k_cursor[0]))
        mbarrier.wait(barriers[4].index(v_cursor[0]), v_cursor[1])
        mbarrier.arrive(barriers[5].index(v_cursor[0]))
        k_cursor = next_stage(k_cursor, SIZES[2])
        v_cursor = next_stage(v_cursor, SIZES[3])
    return k_cursor, v_cursor


@gluon.jit
def computing_group(
    strip: gl.constexpr, dq_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale,
    rule, SIZES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Computes one strip of each tile that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    APART: gl.constexpr = SIZES[4]
    buffer, slots = buffers[5].index(strip), buffers[4]
    full, free, published = barriers[0].index(strip), barriers[1].index(strip), barriers[6]
    k_cursor = (gl.to_tensor(0), gl.to_tensor(0))
    v_cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(published.index(0), 0)
    place = read_slot(slots.index(0))
    tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
    while place < num_places:
        masked = num_masked(runs)
        count = num_blocks(runs)
        past = blocks_past(strip, tile, runs, rule[0], BLOCK_N, RULE[3])
        k_cursor, v_cursor = skip_blocks(past, k_cursor, v_cursor, barriers, SIZES)
        i = tile[3] + strip * STRIP + gl.arange(0, STRIP, gl.SliceLayout(1, scores))
        total = gl.zeros([STRIP, D], gl.float32, sums)
        mbarrier.wait(full, turn % 2)
        if APART:
            mbarrier.arrive(free, pred=past == count)
        for number in range(past, masked):
            first = block_at(number, runs, unmasked) * BLOCK_N
            total = add_block(
                total, i, first, number == count - 1, k_cursor, v_cursor, buffers, barriers, strip, tile,
                half_alpha, rule, SIZES, RULE, True,
            )  # fmt: skip
            k_cursor = next_stage(k_cursor, SIZES[2])
            v_cursor = next_stage(v_cursor, SIZES[3])
        for number in range(gl.maximum(past, masked), count):
            total = add_block(
                total, i, 0, number == count - 1, k_cursor, v_cursor, buffers, barriers, strip, tile,
                half_alpha, rule, SIZES, RULE, False,
            )  # fmt: skip
            k_cursor = next_stage(k_cursor, SIZES[2])
            v_cursor = next_stage(v_cursor, SIZES[3])
        turn += 1
        mbarrier.wait(published.index(turn % 2), turn // 2 % 2)  # early, so that the next item is on its way
        place = read_slot(slots.index(turn % 2))
        done, column = tile, head * D
        tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
        if APART:
            tma.store_wait(0)  # the rows of the previous tile have left the buffer
        # A strip past the end of the sample stores too: all of its rows are out of bounds, so nothing is
        # written.
        buffer.reshape([STRIP, D]).store((total * (half_alpha * inverse_scale)).to(dq_desc.dtype))
        fence_async_shared()
        store_rows(dq_desc, done, done[3], strip * STRIP, column, buffer)
        if not APART:
            tma.store_wait(0)
            mbarrier.arrive(free)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=VARYING)
def rows_kernel(
    q_desc, g_desc, k_desc, v_desc, dq_desc, items, counter, num_items, num_heads,
    stride_q, stride_g, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    APART: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dQ [T, H, D], contiguous. One program runs per processor, and `counter` starts at 0. The
    strides are those of a head, in elements."""
    SIZES: gl.constexpr = (D, BLOCK_N, K_STAGES, V_STAGES, APART)
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    q_buffer = new_buffers(q_desc, STRIPS)
    g_buffer = new_buffers(g_desc, STRIPS)
    k_buffer = new_buffers(k_desc, K_STAGES)
    v_buffer = new_buffers(v_desc, V_STAGES)
    out_buffer = q_buffer
    if APART:
        out_buffer = new_buffers(dq_desc, STRIPS)
    slots = new_slots(2)
    rows_full, rows_free = new_ring(STRIPS)
    k_full, k_free = new_ring(K_STAGES)
    v_full, v_free = new_ring(V_STAGES)
    published = new_barriers(2)
    init_barriers(published, 2, 1)
    for strip in gl.static_range(STRIPS):
        mbarrier.init(rows_full.index(strip), count=2)  # q and dO arrive separately
        mbarrier.init(rows_free.index(strip), count=1)
    init_rings(((k_full, k_free),), K_STAGES, STRIPS)
    init_rings(((v_full, v_free),), V_STAGES, STRIPS)
    fence_async_shared()
    buffers = (q_buffer, g_buffer, k_buffer, v_buffer, slots, out_buffer)
    barriers = (rows_full, rows_free, k_full, k_free, v_full, v_free, published)
    num_places = num_items * num_heads
    loading = (
        q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads,
        (stride_q, stride_g, stride_k, stride_v), SIZES,
    )  # fmt: skip
    # The tuple must be a literal: with a name, or added to another, it would lose the compile-time values of
    # its members.
    gl.warp_specialize([
        (computing_group, (
            strip, dq_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, rule,
            SIZES, RULE,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
