"""Computes dK and dV on Hopper by tiles of keys, for heads of at most 128 columns.

Each warp group sums both gradients for one strip. Formulas, names and the loading warp are those of
`backward`. dQ comes from `backward_rows`, so there is no dS in shared memory, no warp group waits for
another, and there are registers to spare.

    buffers   q, g (dO), k, v, out twice, slots for places in the list
    barriers  as in `backward`
    SIZES     D, BLOCK_M, STAGES, STRIPS, V_STAGES
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recsys.ops.hstu_attention.hopper.backward import (
    UNSEEN,
    VARYING,
    barriers_of_keys,
    fetch,
    loading_ahead,
    operand_buffers,
    seen_by_keys,
    store_strip,
    weight_and_slope,
)
from recsys.ops.hstu_attention.hopper.forward import block_at, masked_block, num_blocks, num_masked
from recsys.ops.runtime.gluon_pieces import (
    STRIP,
    new_buffers,
    new_slots,
    next_stage,
    opaque,
    read_slot,
    skip_blocks,
)


@gluon.jit
def add_rows(
    sums, row, cursor, slots, buffers, barriers, strip: gl.constexpr, tile, half_alpha, rule,
    SIZES: gl.constexpr, RULE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the contribution of the rows from `row` on to `sums`, dK and dV of a strip of keys. `slots`: the
    buffers of the keys and of the values."""
    grad_k, grad_v = sums
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    STRIPS: gl.constexpr = SIZES[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, grad_k.type.layout, 2)
    q_full, q_free, g_full, g_free = barriers[0], barriers[1], barriers[2], barriers[3]
    stage, parity = cursor
    q = buffers[0].index(stage).reshape([BLOCK_M, D])
    g = buffers[1].index(stage).reshape([BLOCK_M, D])
    k = buffers[2].index(opaque(slots[0])).reshape([STRIPS * STRIP, D]).slice(strip * STRIP, STRIP, 0)
    v = buffers[3].index(opaque(slots[1])).reshape([STRIPS * STRIP, D]).slice(strip * STRIP, STRIP, 0)
    dtype: gl.constexpr = q.dtype
    nothing = gl.zeros([STRIP, BLOCK_M], gl.float32, scores)

    mbarrier.wait(q_full.index(stage), parity)
    score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(g_full.index(stage), parity)
    grad = warpgroup_mma(v, g.permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    x = score * half_alpha
    if MASKED:
        seen = seen_by_keys(score, tile[3] + strip * STRIP, row, tile, rule, RULE)
        x = gl.where(seen, x, UNSEEN)
    weight, slope = weight_and_slope(x)
    weight = gl.convert_layout(weight.to(dtype), operand)
    grad_v = warpgroup_mma(weight, g, grad_v, is_async=True)
    grad, slope = warpgroup_mma_wait(1, deps=(grad, slope))
    rounded = gl.convert_layout((grad * slope + grad).to(dtype), operand)
    grad_k = warpgroup_mma(rounded, q, grad_k, is_async=True)
    grad_v = warpgroup_mma_wait(1, deps=(grad_v,))
    mbarrier.arrive(g_free.index(stage))
    grad_k = warpgroup_mma_wait(0, deps=(grad_k,))
    mbarrier.arrive(q_free.index(stage))
    return grad_k, grad_v


@gluon.jit
def num_before(strip: gl.constexpr, tile, runs, num_contextual, BLOCK_M: gl.constexpr):
    """Returns how many blocks hold only rows before the strip: they see nothing of it, unless they are
    contextual. These blocks are the last ones that need a mask."""
    first = tile[3] + strip * STRIP
    masked = num_masked(runs)
    row = masked_block(0, runs) * BLOCK_M
    before = gl.minimum(gl.maximum(first - row, 0) // BLOCK_M, masked)
    return gl.where(row >= num_contextual, before, 0)


@gluon.jit
def computing_group(
    strip: gl.constexpr, dk_desc, dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha,
    inverse_scale, rule, SIZES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Computes one strip of each tile of keys that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    V_STAGES: gl.constexpr = SIZES[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_full, v_full, k_free, v_free = barriers[4], barriers[5], barriers[6], barriers[7]
    out, published = buffers[4].index(strip), buffers[6]
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    v_cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(k_full.index(0), 0)
    place = read_slot(published.index(0))
    tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
    while place < num_places:
        count = num_blocks(runs)
        masked = num_masked(runs)
        slots = (turn % 2, v_cursor[0])
        grad_k = gl.zeros([STRIP, D], gl.float32, layout)
        grad_v = gl.zeros([STRIP, D], gl.float32, layout)
        mbarrier.wait(v_full.index(v_cursor[0]), v_cursor[1])
        before = gl.to_tensor(0)
        if strip > 0:
            before = num_before(strip, tile, runs, rule[0], BLOCK_M)
        for number in range(masked - before):
            row = block_at(number, runs, unmasked) * BLOCK_M
            grad_k, grad_v = add_rows(
                (grad_k, grad_v), row, cursor, slots, buffers, barriers, strip, tile, half_alpha, rule,
                SIZES, RULE, True,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        cursor = skip_blocks(before, cursor, barriers[0:4], STAGES)
        for _number in range(masked, count):
            grad_k, grad_v = add_rows(
                (grad_k, grad_v), 0, cursor, slots, buffers, barriers, strip, tile, half_alpha, rule,
                SIZES, RULE, False,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        mbarrier.arrive(v_free.index(slots[1]))
        mbarrier.arrive(k_free.index(slots[0]))
        turn += 1
        v_cursor = next_stage(v_cursor, V_STAGES)
        mbarrier.wait(k_full.index(turn % 2), turn // 2 % 2)  # early, so that the next item is on its way
        place = read_slot(published.index(turn % 2))
        done, column = tile, head * D
        tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
        tma.store_wait(0)  # dK of the previous tile has left the buffer
        store_strip(grad_v * inverse_scale, dv_desc, out, done, strip, column, D)
        tma.store_wait(0)
        store_strip(grad_k * (half_alpha * inverse_scale), dk_desc, out, done, strip, column, D)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=VARYING)
def keys_kernel(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, items, counter, num_items, num_heads,
    stride_q, stride_g, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV [T, H, D], contiguous. One program runs per processor, and `counter` starts at 0.
    The strides are those of a head, in elements."""
    STRIPS: gl.constexpr = 2
    SIZES: gl.constexpr = (D, BLOCK_M, STAGES, STRIPS, V_STAGES)
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    q_buffer, g_buffer, k_buffer, v_buffer = operand_buffers(q_desc, g_desc, k_desc, v_desc, SIZES)
    out_buffer = new_buffers(dk_desc, STRIPS)
    slots = new_slots(2)
    buffers = (q_buffer, g_buffer, k_buffer, v_buffer, out_buffer, out_buffer, slots)
    barriers = barriers_of_keys(SIZES)
    num_places = num_items * num_heads
    loading = (
        q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads,
        (stride_q, stride_g, stride_k, stride_v), SIZES,
    )  # fmt: skip
    # The tuple must be a literal: with a name, or added to another, it would lose the compile-time values of
    # its members.
    gl.warp_specialize([
        (computing_group, (
            strip, dk_desc, dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha,
            inverse_scale, rule, SIZES, RULE,
        )) if strip < STRIPS else (loading_ahead, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
