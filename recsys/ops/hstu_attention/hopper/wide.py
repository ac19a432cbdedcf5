"""Computes dK and dV on Hopper for heads so wide that one warp group cannot hold both.

Formulas and names are those of `backward`, the schedule is that of `forward`. A program owns a tile of 64
keys. One warp group has the keys and sums dV, another has the values and sums dK, over one block of rows of q
and dO at a time:

    value group   scores = K Q^T, weights in registers, dV += weights dO
    key group     dO V^T, times the slopes that the value group leaves in shared memory, dK += dS Q

Each group has half of the products, and computes its weights while the tensor cores work for the other group.
Twice the slopes minus one, at most 1.2 in magnitude, travel as float16 whatever the dtype of the operands:
their absolute error is at most 2^-11, like that of `tanh`. dV and dK leave through the buffers in which the
last dO and q arrived; the next keys and values arrive meanwhile.

    buffers   q, g, k, v, slopes, two slots for items of the list
    barriers  q full and free, g full and free, k full and free, v full and free, slopes full and free,
              published (an item is in the slot)
    SIZES     D, BLOCK_M, STAGES
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recsys.ops.hstu_attention.hopper.backward import UNSEEN, VARYING, seen_by_keys, weight_and_slope
from recsys.ops.hstu_attention.hopper.forward import (
    ITEM,
    block_at,
    load_item,
    num_blocks,
    num_masked,
    read_item_slot,
    take_place,
)
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
    previous_stage,
    store_rows,
)

AHEAD = gl.constexpr(3)
"""Number of blocks before the end of a tile at which `look_ahead` reads the next item."""


@gluon.jit
def look_ahead(number, count, place, item, items, counter, num_places, num_heads):
    """Prefetches the loading warp's next tile; to be called after each block `number` of a tile of `count`
    blocks.

    `2 AHEAD` blocks before the end it takes a place in the list. `AHEAD` blocks before the end, or a little
    later in short tiles so that the place has arrived, it reads the item there. Returns place and item,
    unchanged until then.
    """
    if number == gl.maximum(count - 2 * AHEAD, 0):
        place = take_place(counter)
    if number == gl.maximum(count - AHEAD, gl.minimum(count - 1, AHEAD)):
        item = load_item(items, place, num_places, num_heads)
    return place, item


@gluon.jit
def loading_warp(
    q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads, strides,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Takes tiles of keys in the order of the list, each one when the previous tile is nearly done, publishes
    their items and loads their operands. Rows run ahead in `STAGES` buffers."""
    BLOCK_M: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    q_buffer, g_buffer, k_buffer, v_buffer, slots = buffers[0], buffers[1], buffers[2], buffers[3], buffers[5]
    q_full, q_free, g_full, g_free = barriers[0], barriers[1], barriers[2], barriers[3]
    k_full, k_free, v_full, v_free, published = (
        barriers[4],
        barriers[5],
        barriers[6],
        barriers[7],
        barriers[10],
    )
    stride_q, stride_g, stride_k, stride_v = strides
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    place = gl.program_id(0)
    item = load_item(items, place, num_places, num_heads)
    while place < num_places:
        slots.index(turn % 2).store(item)  # the item of the tile two before has been read
        _, tile, runs, unmasked, head = read_item_slot(slots.index(turn % 2))
        count = num_blocks(runs)
        if count == 0:  # padding of the list: nothing is published
            place, item = look_ahead(0, 1, place, item, items, counter, num_places, num_heads)
        else:
            mbarrier.arrive(published.index(turn % 2))
            for number in range(count):
                stage, parity = cursor
                first = block_at(number, runs, unmasked) * BLOCK_M
                mbarrier.wait(q_free.index(stage), parity)
                load_rows(q_desc, tile, first, head * stride_q, q_full.index(stage), q_buffer.index(stage))
                mbarrier.wait(g_free.index(stage), parity)
                load_rows(g_desc, tile, first, head * stride_g, g_full.index(stage), g_buffer.index(stage))
                if number == 0:
                    mbarrier.wait(k_free.index(0), turn % 2 ^ 1)
                    load_rows(k_desc, tile, tile[3], head * stride_k, k_full.index(0), k_buffer.index(0))
                    mbarrier.wait(v_free.index(0), turn % 2 ^ 1)
                    load_rows(v_desc, tile, tile[3], head * stride_v, v_full.index(0), v_buffer.index(0))
                cursor = next_stage(cursor, STAGES)
                place, item = look_ahead(number, count, place, item, items, counter, num_places, num_heads)
            turn += 1
    slots.index(turn % 2).store(item)
    mbarrier.arrive(published.index(turn % 2))


@gluon.jit
def add_weighted_rows(
    grad_v, row, cursor, last, buffers, barriers, tile, half_alpha, rule,
    SIZES: gl.constexpr, RULE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the contribution of the block of rows from `row` on to dV, and leaves the slopes for the key
    group. After the last block of a tile it frees the keys, but not the tile's dO: `store_tile` needs that
    buffer."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, grad_v.type.layout, 2)
    stage, parity = cursor
    q = buffers[0].index(stage).reshape([BLOCK_M, D])
    g = buffers[1].index(stage).reshape([BLOCK_M, D])
    k = buffers[2].index(0).reshape([STRIP, D])
    dtype: gl.constexpr = q.dtype
    nothing = gl.zeros([STRIP, BLOCK_M], gl.float32, scores)

    mbarrier.wait(barriers[0].index(stage), parity)
    score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(barriers[2].index(stage), parity)
    score = warpgroup_mma_wait(0, deps=(score,))
    x = score * half_alpha
    if MASKED:
        seen = seen_by_keys(score, tile[3], row, tile, rule, RULE)
        x = gl.where(seen, x, UNSEEN)
    weight, slope = weight_and_slope(x)
    weight = gl.convert_layout(weight.to(dtype), operand)
    grad_v = warpgroup_mma(weight, g, grad_v, is_async=True)
    mbarrier.arrive(barriers[1].index(stage))
    mbarrier.arrive(barriers[5].index(0), pred=last)
    mbarrier.wait(barriers[9].index(stage), parity ^ 1)
    buffers[4].index(stage).store(slope.to(gl.float16))
    mbarrier.arrive(barriers[8].index(stage))
    grad_v = warpgroup_mma_wait(0, deps=(grad_v,))
    mbarrier.arrive(barriers[3].index(stage), pred=last == 0)
    return grad_v


@gluon.jit
def add_sloped_rows(grad_k, cursor, last, buffers, barriers, SIZES: gl.constexpr):
    """Adds the contribution of a block of rows to dK. After the last block of a tile it frees the values, but
    not the tile's q: `store_tile` needs that buffer."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, grad_k.type.layout, 2)
    stage, parity = cursor
    q = buffers[0].index(stage).reshape([BLOCK_M, D])
    g = buffers[1].index(stage).reshape([BLOCK_M, D])
    v = buffers[3].index(0).reshape([STRIP, D])
    dtype: gl.constexpr = q.dtype
    nothing = gl.zeros([STRIP, BLOCK_M], gl.float32, scores)

    mbarrier.wait(barriers[2].index(stage), parity)
    grad = warpgroup_mma(v, g.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(barriers[0].index(stage), parity)
    mbarrier.wait(barriers[8].index(stage), parity)
    slope = buffers[4].index(stage).load(scores)
    grad = warpgroup_mma_wait(0, deps=(grad,))
    rounded = gl.convert_layout((grad * slope.to(gl.float32) + grad).to(dtype), operand)
    grad_k = warpgroup_mma(rounded, q, grad_k, is_async=True)
    mbarrier.arrive(barriers[9].index(stage))  # also signals that dO has been read
    mbarrier.arrive(barriers[3].index(stage))
    mbarrier.arrive(barriers[7].index(0), pred=last)
    grad_k = warpgroup_mma_wait(0, deps=(grad_k,))
    mbarrier.arrive(barriers[1].index(stage), pred=last == 0)
    return grad_k


@gluon.jit
def store_tile(grad, desc, buffer, tile, column, free, D: gl.constexpr):
    """Writes dK or dV through the buffer in which the last rows arrived, and then frees the buffer."""
    rounded = buffer._reinterpret(desc.dtype, [1, 1, STRIP, D], desc.layout)
    rounded.reshape([STRIP, D]).store(grad.to(desc.dtype))
    fence_async_shared()
    store_rows(desc, tile, tile[3], 0, column, rounded)
    tma.store_wait(0)
    mbarrier.arrive(free)


@gluon.jit
def value_group(
    dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, rule,
    SIZES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Computes dV of each tile of keys that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    full, published, slots = barriers[4].index(0), barriers[10], buffers[5]
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(published.index(0), 0)
    place, tile, runs, unmasked, head = read_item_slot(slots.index(0))
    while place < num_places:
        masked = num_masked(runs)
        count = num_blocks(runs)
        grad_v = gl.zeros([STRIP, D], gl.float32, sums)
        mbarrier.wait(full, turn % 2)
        for number in range(masked):
            row = block_at(number, runs, unmasked) * BLOCK_M
            grad_v = add_weighted_rows(
                grad_v, row, cursor, number == count - 1, buffers, barriers, tile, half_alpha, rule,
                SIZES, RULE, True,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        for number in range(masked, count):
            grad_v = add_weighted_rows(
                grad_v, 0, cursor, number == count - 1, buffers, barriers, tile, half_alpha, rule,
                SIZES, RULE, False,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        stage, parity = previous_stage(cursor, STAGES)
        mbarrier.wait(barriers[9].index(stage), parity)
        buffer, free = buffers[1].index(stage), barriers[3].index(stage)
        store_tile(grad_v * inverse_scale, dv_desc, buffer, tile, head * D, free, D)
        turn += 1
        mbarrier.wait(published.index(turn % 2), turn // 2 % 2)
        place, tile, runs, unmasked, head = read_item_slot(slots.index(turn % 2))


@gluon.jit
def key_group(
    dk_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, SIZES: gl.constexpr
):
    """Computes dK of each tile of keys that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    STAGES: gl.constexpr = SIZES[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    full, published, slots = barriers[6].index(0), barriers[10], buffers[5]
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(published.index(0), 0)
    place, tile, runs, _unmasked, head = read_item_slot(slots.index(0))
    while place < num_places:
        grad_k = gl.zeros([STRIP, D], gl.float32, sums)
        mbarrier.wait(full, turn % 2)
        count = num_blocks(runs)
        for number in range(count):
            grad_k = add_sloped_rows(grad_k, cursor, number == count - 1, buffers, barriers, SIZES)
            cursor = next_stage(cursor, STAGES)
        grad_k = grad_k * (half_alpha * inverse_scale)
        stage, _parity = previous_stage(cursor, STAGES)
        buffer, free = buffers[0].index(stage), barriers[1].index(stage)
        store_tile(grad_k, dk_desc, buffer, tile, head * D, free, D)
        turn += 1
        mbarrier.wait(published.index(turn % 2), turn // 2 % 2)
        place, tile, runs, _unmasked, head = read_item_slot(slots.index(turn % 2))


@gluon.jit(do_not_specialize=VARYING)
def wide_keys_kernel(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, items, counter, num_items, num_heads,
    stride_q, stride_g, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV [T, H, D], contiguous. One program runs per processor, and `counter` starts at 0.
    The strides are those of a head, in elements."""
    SIZES: gl.constexpr = (D, BLOCK_M, STAGES)
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    q_buffer = new_buffers(q_desc, STAGES)
    g_buffer = new_buffers(g_desc, STAGES)
    k_buffer = new_buffers(k_desc, 1)
    v_buffer = new_buffers(v_desc, 1)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    slopes = gl.allocate_shared_memory(gl.float16, [STAGES, STRIP, BLOCK_M], flat)
    slots = new_slots(2, ITEM)
    q_full, q_free = new_ring(STAGES)
    g_full, g_free = new_ring(STAGES)
    k_full, k_free = new_ring(1)
    v_full, v_free = new_ring(1)
    slopes_full, slopes_free = new_ring(STAGES)
    published = new_barriers(2)
    init_barriers(published, 2, 1)
    init_rings(((q_full, q_free), (g_full, g_free)), STAGES, 2)
    init_rings(((slopes_full, slopes_free),), STAGES, 1)
    init_rings(((k_full, k_free), (v_full, v_free)), 1, 1)
    fence_async_shared()
    buffers = (q_buffer, g_buffer, k_buffer, v_buffer, slopes, slots)
    barriers = (
        q_full, q_free, g_full, g_free, k_full, k_free, v_full, v_free, slopes_full, slopes_free, published
    )  # fmt: skip
    num_places = num_items * num_heads
    loading = (
        q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads,
        (stride_q, stride_g, stride_k, stride_v), SIZES,
    )  # fmt: skip
    # The tuple must be a literal: with a name it would lose the compile-time values of its members.
    gl.warp_specialize(
        [
            (value_group, (
                dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, rule,
                SIZES, RULE,
            )),
            (key_group, (
                dk_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, SIZES,
            )),
            (loading_warp, loading),
        ],
        [4, 1],
        [COMPUTING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip
