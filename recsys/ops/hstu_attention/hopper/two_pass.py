"""Computes the gradients on Hopper in two passes: dK and dV by tiles of keys, then dQ by tiles of rows.

Two passes need seven products instead of five, but no program adds to the sums of another. The result is
therefore bitwise repeatable, and no float32 sums go through memory. Where rows see few keys, two passes are
also faster.

The first pass, `keys_kernel`, is for heads of at most 128 columns (`wide` has the one for wider heads). Each
warp group sums both gradients for one strip. Formulas, names and the loading warp are those of `backward`. dQ
comes from the second pass, so there is no dS in shared memory, no warp group waits for another, and there are
registers to spare.

    buffers   q, g (dO), k, v, out twice, slots for places in the list
    barriers  as in `backward`
    SIZES     D, BLOCK_M, STAGES, STRIPS, V_STAGES

The second pass is `rows_kernel`. Its schedule is that of `forward`: a tile is cut into strips of 64 rows, one
per warp group, and visits the blocks of keys that it sees. The scores and dO V^T of a block are started
together. The slopes are computed while the tensor cores work on the second product and on the other strip,
and dS is the left operand of dQ += dS K in registers. If it fits, dQ leaves through a buffer of its own, so
that the next rows arrive during the last product and the stores; otherwise it leaves through the buffer of q.

    buffers   q, g (dO), k, v, slots for places in the list, out
    barriers  rows full and free, k full and free, v full and free, published
    SIZES     D, BLOCK_N, stages of k, stages of v, APART: whether dQ has a buffer of its own
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
from recsys.ops.hstu_attention.hopper.forward import (
    WARPS,
    block_at,
    blocks_past,
    launch_items,
    masked_block,
    num_blocks,
    num_masked,
    section_of,
    visible,
)
from recsys.ops.hstu_attention.hopper.wide import wide_keys_kernel
from recsys.ops.hstu_attention.mask_forms import rules
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
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
    skip_blocks,
    store_rows,
    tanh,
)


class TwoPassSizes(NamedTuple):
    """Sizes of both kernels for one head width."""

    rows: int  # rows per block, for tiles of keys
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    v_tiles: int  # buffers for tiles of values (keys have two); 0: the kernel for wide heads
    keys: int  # keys per block, for tiles of rows
    k_stages: int  # buffers for blocks of keys
    v_stages: int  # buffers for blocks of values
    apart: bool  # whether dQ leaves through a buffer of its own, not that of q
    computing_registers: int
    loading_registers: int


SIZES = {
    64: TwoPassSizes(64, 4, 2, 64, 4, 4, True, 240, 24),
    128: TwoPassSizes(64, 3, 1, 128, 2, 2, True, 240, 24),
    256: TwoPassSizes(64, 2, 0, 64, 2, 1, False, 232, 40),
}
"""Sizes by head width, in columns."""


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    sizes: TwoPassSizes | None = None,
    *,
    captured: bool = True,
) -> Gradients:
    """Computes the gradients of q, k and v, [T, H, D]. `sizes` and `captured` are those of
    `forward.forward`."""
    gradients = problem.gradient_memory(q, k, v)
    if q.shape[0] == 0:
        return Gradients(*gradients)
    sizes = sizes or SIZES[q.shape[2]]
    operands = [with_loadable_rows(tensor) for tensor in (q, grad_out, k, v)]
    launch_keys(operands, gradients[1:], problem, sizes, captured)
    launch_rows(operands, gradients[0], problem, sizes, captured)
    return Gradients(*gradients)


def launch_keys(
    operands: list[Tensor], grads: list[Tensor], problem: Problem, sizes: TwoPassSizes, captured: bool
) -> None:
    """Launches the kernel of dK and dV, `grads`; `operands` are q, dO, k and v."""
    q, dim = operands[0], operands[0].shape[2]
    kernel = keys_kernel if sizes.v_tiles else wide_keys_kernel
    buffers = {"V_STAGES": sizes.v_tiles} if sizes.v_tiles else {}
    tile = STRIPS.value * STRIP.value if sizes.v_tiles else STRIP.value
    items = key_work(problem.mask, problem.layout, tile, sizes.rows, _section(q, problem), problem.tail)
    rows = (sizes.rows, sizes.rows, tile, tile)
    loaded = [Boxes(tensor, size, dim) for tensor, size in zip(operands, rows, strict=True)]
    written = [Boxes(grad, STRIP.value, dim) for grad in grads]

    def constants() -> dict[str, Any]:
        blocks = {"BLOCK_M": sizes.rows, "STAGES": sizes.stages}
        return blocks | buffers | _constants(problem, dim, sizes)

    launch_items(kernel, items, loaded, written, problem, sizes, constants, captured=captured)


def launch_rows(
    operands: list[Tensor], grad_q: Tensor, problem: Problem, sizes: TwoPassSizes, captured: bool
) -> None:
    """Launches the kernel of dQ; `operands` are q, dO, k and v."""
    q, dim, strip = operands[0], operands[0].shape[2], STRIP.value
    section = _section(q, problem)
    items = row_work(problem.mask, problem.layout, STRIPS.value * strip, sizes.keys, section, problem.tail)
    rows = (strip, strip, sizes.keys, sizes.keys)
    loaded = [Boxes(tensor, size, dim) for tensor, size in zip(operands, rows, strict=True)]
    written = [Boxes(grad_q, strip, dim)]

    def constants() -> dict[str, Any]:
        stages = {"K_STAGES": sizes.k_stages, "V_STAGES": sizes.v_stages, "APART": sizes.apart}
        return {"BLOCK_N": sizes.keys} | stages | _constants(problem, dim, sizes)

    launch_items(rows_kernel, items, loaded, written, problem, sizes, constants, captured=captured)


def _section(q: Tensor, problem: Problem) -> int | None:
    return section_of(4 * q.shape[1] * q.shape[2], problem.mask)  # two operands of 16 bits per element


def _constants(problem: Problem, dim: int, sizes: TwoPassSizes) -> dict[str, Any]:
    """Returns the compile-time constants of both kernels, by the names of their parameters."""
    return {
        "D": dim,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(problem.mask),
    }


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
def computing_keys(
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
        (computing_keys, (
            strip, dk_desc, dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha,
            inverse_scale, rule, SIZES, RULE,
        )) if strip < STRIPS else (loading_ahead, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip


STRIPS = gl.constexpr(2)
"""Strips per tile."""


@gluon.jit
def loading_rows(
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
def skip_blocks_of_rows(count, k_cursor, v_cursor, barriers, SIZES: gl.constexpr):
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
def computing_rows(
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
        k_cursor, v_cursor = skip_blocks_of_rows(past, k_cursor, v_cursor, barriers, SIZES)
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
        (computing_rows, (
            strip, dq_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, rule,
            SIZES, RULE,
        )) if strip < STRIPS else (loading_rows, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
