"""Computes all three gradients in one pass: the hand-scheduled (Gluon) backward kernel for Hopper.

With S, the scores, dO, the gradient of the output, x = alpha S / 2, t = tanh x and w = x + x t:

    silu(alpha S) = w, twice its slope is 1 + t + w (1 - t)
    dV = silu(alpha S)^T dO / scale_len
    dS = (dO V^T) * 2 slope                                  zero for hidden pairs
    dK = dS^T Q alpha / (2 scale_len),    dQ = dS K alpha / (2 scale_len)

A program owns tiles of keys, one strip of 64 keys per warp group, and sums their dK and dV over the blocks of
rows that see them. Scores are [keys, rows], so that their weights and dS are left operands in registers. dS
also goes to shared memory: one block later, each warp group multiplies the dS of all strips with its share of
the keys' columns, and adds the product through the float32 descriptor of dQ to what other programs have
added. The order of these additions is not fixed, so the last bits of dQ vary. Keys, and values if they fit,
arrive while the previous tile is still being computed; dV leaves through the buffer of the tile's keys, dK
through the buffer of the dQ products. Names and the order of the work are those of `forward`.

Shared memory is the bottleneck: with 128 columns, each block costs a strip 1472 cycles of shared memory
against 1280 of the tensor cores. Holding half of the keys' columns in registers saves 64 of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
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

from recsys.ops.hstu_attention import mask_forms, triton_kernels
from recsys.ops.hstu_attention.hopper.forward import (
    WARPS,
    block_at,
    launch_items,
    num_blocks,
    num_masked,
    section_of,
)
from recsys.ops.hstu_attention.mask_forms import rules
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.work_list import kernels as work_item
from recsys.ops.hstu_attention.work_list import key_work
from recsys.ops.hstu_attention.work_list.kernels import NUM_COLUMNS, UNMASKED_START
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import (
    RAGGED_ROWS,
    STRIP,
    async_add_to_global,
    init_rings,
    load_rows,
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
from recsys.ops.runtime.hopper_launch import launch


class BackwardSizes(NamedTuple):
    """Sizes of the one-pass backward kernel for one head width."""

    rows: int  # BLOCK_M, rows per block
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    v_stages: int  # buffers for tiles of values; keys have two
    computing_registers: int
    loading_registers: int


BACKWARD_STRIPS = 2
"""Strips of 64 keys per tile."""

BACKWARD_SIZES = {64: BackwardSizes(64, 4, 2, 240, 24), 128: BackwardSizes(64, 2, 1, 240, 24)}
"""Sizes by head width, in columns."""

LINE = 64
"""Elements per line of `round_kernel`. The total is a multiple of it, so that no access is narrower than 16
bytes."""

ROUNDED_LINES = 64
"""Lines per program of `round_kernel`."""


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    sizes: BackwardSizes | None = None,
    *,
    captured: bool = True,
) -> Gradients:
    """Computes the gradients of q, k and v, [T, H, D]; dQ is summed in any order. The arguments are those of
    `forward`."""
    total_len, num_heads, dim = q.shape
    gradients = problem.gradient_memory(q, k, v)
    if total_len == 0:
        return Gradients(*gradients)
    sizes = sizes or BACKWARD_SIZES[dim]
    mask, layout, device = problem.mask, problem.layout, q.device
    keys = STRIP.value * BACKWARD_STRIPS
    q, k, v, grad_out = map(with_loadable_rows, (q, k, v, grad_out))
    items = key_work(mask, layout, keys, sizes.rows, section_of(num_heads * dim * 8, mask), problem.tail)
    sums = torch.zeros(total_len, num_heads, dim, dtype=torch.float32, device=device)
    rows = (sizes.rows, sizes.rows, keys, keys)
    loaded = [Boxes(tensor, size, dim) for tensor, size in zip((q, grad_out, k, v), rows, strict=True)]
    written = [Boxes(sums, sizes.rows, dim // BACKWARD_STRIPS)]
    written += [Boxes(grad, STRIP.value, dim) for grad in gradients[1:]]

    def constants() -> dict[str, Any]:
        return {**constants_of(sizes, mask), "D": dim}

    launch_items(backward_kernel, items, loaded, written, problem, sizes, constants, captured=captured)
    round_to(gradients[0], sums, 0.5 * problem.alpha / problem.scale_len, even_first=True)
    return Gradients(*gradients)


def constants_of(sizes: BackwardSizes, mask: AttentionMask) -> dict[str, int | bool]:
    """Returns the compile-time constants of the backward kernel, except the head width, by parameter name."""
    return {
        "BLOCK_M": sizes.rows,
        "STAGES": sizes.stages,
        "V_STAGES": sizes.v_stages,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(mask),
    }


def round_to(rounded: Tensor, sums: Tensor, factor: float, *, even_first: bool = False) -> None:
    """Writes `rounded = sums * factor`, [T, H, D] with D a multiple of 64. Rows of `rounded` need not be
    contiguous.

    `even_first`: every eight columns of `sums` hold columns 0, 2, 4, 6, 1, 3, 5, 7 of the result.
    """
    if sums.device.type != "cuda":  # in the emulator
        if even_first:
            sums = sums.unflatten(2, (-1, 2, 4)).transpose(3, 4).flatten(2)
        torch.mul(sums, factor, out=rounded)
        return
    num_lines, in_row = sums.numel() // LINE, sums[0].numel() // LINE
    launch(
        round_kernel,
        (rounded.dtype, in_row, rounded.stride(0), even_first),
        -(-num_lines // ROUNDED_LINES),
        (),
        (sums, rounded),
        (num_lines, factor),
        lambda: {
            "IN_ROW": in_row,
            "STRIDE": rounded.stride(0),
            "LINES": ROUNDED_LINES,
            "LINE": LINE,
            "EVEN_FIRST": even_first,
            "num_warps": WARPS,
        },
    )


@triton.jit(do_not_specialize=["num_lines"])
def round_kernel(
    sums, rounded, num_lines, factor,
    IN_ROW: tl.constexpr, STRIDE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    EVEN_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes `rounded = sums * factor`, [num_lines, LINE], last lines first: they are still in the cache.

    Rows have IN_ROW lines each; they are STRIDE elements apart in `rounded` and contiguous in `sums`.
    EVEN_FIRST: in `sums` every eight elements hold elements 0, 2, 4, 6, 1, 3, 5, 7 of the result.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    line = program * LINES + tl.arange(0, LINES)[:, None]
    within = tl.arange(0, LINE)[None, :]
    value = tl.load(sums + line.to(tl.int64) * LINE + within, mask=line < num_lines)
    place = (line // IN_ROW).to(tl.int64) * STRIDE + (line % IN_ROW) * LINE + within
    value = (value * factor).to(rounded.dtype.element_ty)
    if EVEN_FIRST:
        eights = tl.reshape(value, LINES, LINE // 8, 2, 4)
        value = tl.reshape(tl.permute(eights, 0, 1, 3, 2), LINES, LINE)
    tl.store(rounded + place, value, mask=line < num_lines)


UNSEEN = gl.constexpr(triton_kernels.UNSEEN.value)

VARYING = ("num_items", "num_heads", "stride_q", "stride_g", "stride_k", "stride_v")

VARYING += ("num_contextual", "window", "prefix", "group_size")
"""Parameters that vary with the batch or the model; kernels are not recompiled for them."""

FULL, FREE, DONE = gl.constexpr(8), gl.constexpr(12), gl.constexpr(4)
"""First numbers of the hardware barriers. FULL and FREE have one per strip and dS buffer: FULL means that the
other strip has stored its half of dS, FREE that it has multiplied both halves. DONE has one per strip: the
other strip no longer needs the keys of the tile. Barriers in shared memory would cost more: the compiler
would stop all warps of the group so that a single thread can signal. Triton itself uses the numbers below 4.
"""

HELD = gl.constexpr(64)
"""Columns of the keys that are in registers for blocks without a mask."""

visible_from_keys = gluon.jit(mask_forms.visible_from_keys.fn)

load_tile = gluon.jit(work_item.load_tile.fn)

load_runs = gluon.jit(work_item.load_runs.fn)


@gluon.jit
def fetch(items, place, num_heads):
    """Loads the item at `place` of the list: its tile, its runs, the first block that needs no mask, and its
    head.

    Passing items through shared memory and taking tiles late, as `forward` does, sped up only the kernel for
    heads of 256 and slowed most others by 1 to 4 % (experiments/2026-11-22-gpu-attention-3/backward.md).
    """
    item = items + (place // num_heads).to(gl.int64) * NUM_COLUMNS
    unmasked = gl.load(item + UNMASKED_START).to(gl.int32)
    return load_tile(item), load_runs(item), unmasked, place % num_heads


@gluon.jit
def load_tile_of_keys(
    place, state, q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, num_heads, strides,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Loads a tile of keys and the rows that see it. `state` and the result: the cursors of rows and of
    values, and the tile's number in this program."""
    BLOCK_M: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    V_STAGES: gl.constexpr = SIZES[4]
    q_buffer, g_buffer, k_buffer, v_buffer, slots = buffers[0], buffers[1], buffers[2], buffers[3], buffers[6]
    q_full, q_free, g_full, g_free = barriers[0], barriers[1], barriers[2], barriers[3]
    k_full, v_full, k_free, v_free = barriers[4], barriers[5], barriers[6], barriers[7]
    stride_q, stride_g, stride_k, stride_v = strides
    cursor, v_cursor, turn = state
    tile, runs, unmasked, head = fetch(items, place, num_heads)
    count = num_blocks(runs)
    if count > 0:
        slot = turn % 2
        for number in range(count):
            stage, parity = cursor
            first = block_at(number, runs, unmasked) * BLOCK_M
            mbarrier.wait(q_free.index(stage), parity)
            load_rows(q_desc, tile, first, head * stride_q, q_full.index(stage), q_buffer.index(stage))
            if number == 0:
                mbarrier.wait(k_free.index(slot), turn // 2 % 2 ^ 1)
                publish(place, slots.index(slot))  # the tile two before has been read
                load_rows(k_desc, tile, tile[3], head * stride_k, k_full.index(slot), k_buffer.index(slot))
            mbarrier.wait(g_free.index(stage), parity)
            load_rows(g_desc, tile, first, head * stride_g, g_full.index(stage), g_buffer.index(stage))
            if number == 0:
                at, v_parity = v_cursor
                mbarrier.wait(v_free.index(at), v_parity)
                load_rows(v_desc, tile, tile[3], head * stride_v, v_full.index(at), v_buffer.index(at))
            cursor = next_stage(cursor, STAGES)
        v_cursor = next_stage(v_cursor, V_STAGES)
        turn += 1
    return cursor, v_cursor, turn


@gluon.jit
def loading_ahead(
    q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads, strides,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Takes tiles of keys in the order of the list and loads their operands ahead of use: rows in `STAGES`
    buffers, the next tile's keys and values as far as their buffers allow."""
    state = ((gl.to_tensor(0), gl.to_tensor(1)), (gl.to_tensor(0), gl.to_tensor(1)), gl.to_tensor(0))
    place = gl.program_id(0)
    while place < num_places:
        following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        state = load_tile_of_keys(
            place, state, q_desc, g_desc, k_desc, v_desc, buffers, barriers, items, num_heads, strides, SIZES
        )
        place = following
    turn = state[2]
    slots, k_full, k_free = buffers[6], barriers[4], barriers[6]
    mbarrier.wait(k_free.index(turn % 2), turn // 2 % 2 ^ 1)
    publish(place, slots.index(turn % 2))
    mbarrier.arrive(k_full.index(turn % 2))


@gluon.jit
def seen_by_keys(score, key, row, tile, rule, RULE: gl.constexpr):
    """Returns True where the mask lets a pair of [keys, rows] through. `key` and `row` are the block's first
    key and row. A thread has few keys and many rows, so bounds for each row would fill its registers."""
    i = row + gl.arange(0, score.shape[1], gl.SliceLayout(0, score.type.layout))
    j = key + gl.arange(0, score.shape[0], gl.SliceLayout(1, score.type.layout))
    return visible_from_keys(gl.expand_dims(i, 0), gl.expand_dims(j, 1), tile[2], rule, RULE)


@gluon.jit
def strip_barrier(barrier: gl.constexpr, block, strip: gl.constexpr, TEXT: gl.constexpr):
    """Executes a barrier instruction on the hardware barrier of `strip` for the buffer of block number
    `block`. The barrier counts the threads of both strips."""
    number = gl.to_tensor(barrier + 2 * strip + (block & 1))
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [number, 2 * 128], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal(barrier: gl.constexpr, block, strip: gl.constexpr):
    """Signals to the other strip, `strip`, about the buffer of block number `block`; each warp for itself."""
    strip_barrier(barrier, block, strip, "bar.arrive $1, $2; mov.u32 $0, 0;")


@gluon.jit
def await_signal(barrier: gl.constexpr, block, strip: gl.constexpr):
    """Waits until all warps of this strip, `strip`, have arrived and all of the other strip have signaled."""
    strip_barrier(barrier, block, strip, "bar.sync $1, $2; mov.u32 $0, 0;")


@gluon.jit
def weight_and_slope(x):
    """Returns silu(2 x), and twice its slope minus one: the product that follows adds the missing one, which
    saves an instruction in each. For UNSEEN they are exactly 0 and -1."""
    t = tanh(x)
    weight = x * t + x
    return weight, (weight - weight * t) + t


@gluon.jit
def start_scores(k, held, q, SIZES: gl.constexpr, HOLDS: gl.constexpr):
    """Starts K Q^T for a strip of keys and a block of rows. HOLDS: the first columns of the keys are in
    registers."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    nothing = gl.zeros([STRIP, BLOCK_M], gl.float32, scores)
    if not HOLDS:
        score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    elif HELD == D:
        score = warpgroup_mma(held, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        first, others = q.slice(0, HELD, 1), q.slice(HELD, D - HELD, 1)
        score = warpgroup_mma(held, first.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma(k.slice(HELD, D - HELD, 1), others.permute((1, 0)), score, is_async=True)
    return score


@gluon.jit
def start_part(block, slot, buffers, strip: gl.constexpr, SIZES: gl.constexpr):
    """Starts dS K for block number `block` of this program and the strip's share of the columns. `slot`: the
    buffer of the keys."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    STRIPS: gl.constexpr = SIZES[3]
    PART: gl.constexpr = D // STRIPS
    parts: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    keys = buffers[2].index(opaque(slot)).reshape([STRIPS * STRIP, D]).slice(strip * PART, PART, 1)
    ds = buffers[4].index(block & 1).permute((1, 0))
    nothing = gl.zeros([BLOCK_M, PART], gl.float32, parts)
    await_signal(FULL, block, strip)
    return warpgroup_mma(ds, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def store_part(part, block, row, place, dq_desc, buffers, strip: gl.constexpr, tile):
    """Adds the product of `start_part` to the sums of dQ, from row `row` of the sample on. `place`: the row
    and column where the sums of the sample and head begin.

    Of every eight columns a thread has two adjacent ones in each row. Stored side by side they would cause
    bank conflicts in shared memory; with even columns first, `stmatrix` stores them at full speed.
    """
    ROWS: gl.constexpr = part.shape[0]
    COLUMNS: gl.constexpr = part.shape[1]
    signal(FREE, block, 1 - strip)
    part = part.reshape([ROWS, COLUMNS // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS])
    tma.store_wait(0)  # the previous content has left the buffer
    buffer = buffers[5].index(opaque(strip))
    buffer.reshape([ROWS, COLUMNS]).store(part)
    fence_async_shared()
    end = place[0] + tile[1]
    async_add_to_global(dq_desc, [RAGGED_ROWS, end, RAGGED_ROWS - tile[1] + row, place[1]], buffer)


@gluon.jit
def add_rows(
    sums, block, row, row_before, cursor, slots, held, buffers, barriers, strip: gl.constexpr, tile, dq_desc,
    place, half_alpha, rule,
    SIZES: gl.constexpr, RULE: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Adds the contribution of the rows from `row` on, block number `block` of this program, to `sums`, dK
    and dV of a strip of keys.

    dQ receives the product of the previous block, whose rows begin at `row_before`, so that no strip waits
    for the other's dS; FIRST: there is no previous block. On return only the copy of that product is in
    flight. `slots`: the buffers of the keys and of the values, and the parity of the latter. `held`: columns
    of the keys in registers, for blocks without a mask.
    """
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

    mbarrier.wait(q_full.index(stage), parity)
    score = start_scores(k, held, q, SIZES, not MASKED)
    mbarrier.wait(g_full.index(stage), parity)
    if FIRST:
        mbarrier.wait(barriers[5].index(slots[1]), slots[2])
    nothing = gl.zeros([STRIP, BLOCK_M], gl.float32, scores)
    grad = warpgroup_mma(v, g.permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    x = score * half_alpha
    if MASKED:
        seen = seen_by_keys(score, tile[3] + strip * STRIP, row, tile, rule, RULE)
        x = gl.where(seen, x, UNSEEN)
    weight, slope = weight_and_slope(x)
    weight = gl.convert_layout(weight.to(dtype), operand)
    grad_v = warpgroup_mma(weight, g, grad_v, is_async=True)
    grad = warpgroup_mma_wait(1, deps=(grad,))
    rounded = (grad * slope + grad).to(dtype)
    await_signal(FREE, block, strip)
    buffers[4].index(block & 1).slice(strip * STRIP, STRIP, 0).store(rounded)
    fence_async_shared()
    signal(FULL, block, 1 - strip)
    rounded = gl.convert_layout(rounded, operand)
    if FIRST:
        grad_k = warpgroup_mma(rounded, q, grad_k, is_async=True)
        grad_v = warpgroup_mma_wait(1, deps=(grad_v,))
        mbarrier.arrive(g_free.index(stage))
    else:
        part = start_part(block - 1, slots[0], buffers, strip, SIZES)
        grad_k = warpgroup_mma(rounded, q, grad_k, is_async=True)
        grad_v = warpgroup_mma_wait(2, deps=(grad_v,))
        mbarrier.arrive(g_free.index(stage))
        part = warpgroup_mma_wait(1, deps=(part,))
        store_part(part, block - 1, row_before, place, dq_desc, buffers, strip, tile)
    grad_k = warpgroup_mma_wait(0, deps=(grad_k,))
    mbarrier.arrive(q_free.index(stage))
    return grad_k, grad_v


@gluon.jit
def pass_rows(
    block, row_before, cursor, slots, buffers, barriers, strip: gl.constexpr, tile, dq_desc, place,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Replaces `add_rows` for rows that see nothing of the strip: stores zeros as its dS, and adds the
    product of the previous block to dQ. The arguments are those of `add_rows`."""
    BLOCK_M: gl.constexpr = SIZES[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    q_full, q_free, g_full, g_free = barriers[0], barriers[1], barriers[2], barriers[3]
    stage, parity = cursor
    ds = buffers[4].index(block & 1).slice(strip * STRIP, STRIP, 0)
    await_signal(FREE, block, strip)
    ds.store(gl.zeros([STRIP, BLOCK_M], gl.float32, scores).to(ds.dtype))
    fence_async_shared()
    signal(FULL, block, 1 - strip)
    part = start_part(block - 1, slots[0], buffers, strip, SIZES)
    part = warpgroup_mma_wait(0, deps=(part,))
    store_part(part, block - 1, row_before, place, dq_desc, buffers, strip, tile)
    mbarrier.wait(q_full.index(stage), parity)
    mbarrier.arrive(q_free.index(stage))
    mbarrier.wait(g_full.index(stage), parity)
    mbarrier.arrive(g_free.index(stage))


@gluon.jit
def store_strip(grad, desc, buffer, tile, strip: gl.constexpr, column, D: gl.constexpr):
    """Starts to write rows of dK or dV through a buffer; the copy is still in flight on return."""
    rounded = buffer._reinterpret(desc.dtype, [1, 1, STRIP, D], desc.layout)
    rounded.reshape([STRIP, D]).store(grad.to(desc.dtype))
    fence_async_shared()
    store_rows(desc, tile, tile[3], strip * STRIP, column, rounded)


@gluon.jit
def computing_group(
    strip: gl.constexpr, dq_desc, dk_desc, dv_desc, buffers, barriers, items, num_places, num_heads,
    half_alpha, inverse_scale, rule, SIZES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """Computes one strip of each tile of keys that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    BLOCK_M: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    V_STAGES: gl.constexpr = SIZES[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k_full, k_free, v_free, published = barriers[4], barriers[6], barriers[7], buffers[6]
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    v_cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    block = gl.to_tensor(0)
    for buffer in gl.static_range(2):
        signal(FREE, buffer, 1 - strip)
    mbarrier.wait(k_full.index(0), 0)
    place = read_slot(published.index(0))
    tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
    while place < num_places:
        count = num_blocks(runs)
        masked = num_masked(runs)
        part_place = (tile[0].to(gl.int32), head * D + strip * (D // STRIPS))
        slots = (turn % 2, v_cursor[0], v_cursor[1])
        grad_k = gl.zeros([STRIP, D], gl.float32, layout)
        grad_v = gl.zeros([STRIP, D], gl.float32, layout)
        held = 0
        row = block_at(0, runs, unmasked) * BLOCK_M
        grad_k, grad_v = add_rows(
            (grad_k, grad_v), block, row, row, cursor, slots, held, buffers, barriers, strip, tile,
            dq_desc, part_place, half_alpha, rule, SIZES, RULE, True, True,
        )  # fmt: skip
        cursor = next_stage(cursor, STAGES)
        for number in range(1, masked):
            row_before = row
            row = block_at(number, runs, unmasked) * BLOCK_M
            unseen = gl.to_tensor(False)
            if strip > 0:  # only contextual rows see keys behind themselves
                unseen = (row + BLOCK_M <= tile[3] + strip * STRIP) & (row >= rule[0])
            if unseen:
                pass_rows(
                    block + number, row_before, cursor, slots, buffers, barriers, strip, tile, dq_desc,
                    part_place, SIZES,
                )  # fmt: skip
            else:
                grad_k, grad_v = add_rows(
                    (grad_k, grad_v), block + number, row, row_before, cursor, slots, held, buffers,
                    barriers, strip, tile, dq_desc, part_place, half_alpha, rule, SIZES, RULE, True, False,
                )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        k = buffers[2].index(slots[0]).reshape([STRIPS * STRIP, D]).slice(strip * STRIP, STRIP, 0)
        held = k.slice(0, HELD, 1).load(gl.DotOperandLayout(0, scores, 2))
        for number in range(gl.maximum(masked, 1), count):
            row_before = row
            row = (unmasked + number - masked) * BLOCK_M
            grad_k, grad_v = add_rows(
                (grad_k, grad_v), block + number, row, row_before, cursor, slots, held, buffers, barriers,
                strip, tile, dq_desc, part_place, half_alpha, rule, SIZES, RULE, False, False,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        mbarrier.arrive(v_free.index(slots[1]))
        block += count
        part = start_part(block - 1, slots[0], buffers, strip, SIZES)
        part = warpgroup_mma_wait(0, deps=(part,))
        signal(DONE, 0, 1 - strip)
        store_part(part, block - 1, row, part_place, dq_desc, buffers, strip, tile)
        turn += 1
        v_cursor = next_stage(v_cursor, V_STAGES)
        mbarrier.wait(k_full.index(turn % 2), turn // 2 % 2)  # early, so that the next item is on its way
        place = read_slot(published.index(turn % 2))
        done, done_head = tile, head
        tile, runs, unmasked, head = fetch(items, gl.minimum(place, num_places - 1), num_heads)
        await_signal(DONE, 0, strip)  # the buffer of the keys is free
        keys = buffers[2].index(opaque(slots[0]))
        keys = keys._reinterpret(dv_desc.dtype, [STRIPS] + dv_desc.block_shape, dv_desc.layout)
        store_strip(
            grad_v * inverse_scale, dv_desc, keys.index(strip), done, strip, done_head * D, D,
        )  # fmt: skip
        tma.store_wait(1)  # the last product of dQ has left its buffer
        store_strip(
            grad_k * (half_alpha * inverse_scale), dk_desc, buffers[5].index(strip), done, strip,
            done_head * D, D,
        )  # fmt: skip
        tma.store_wait(1)  # dV has left its buffer, too
        mbarrier.arrive(k_free.index(slots[0]))
    tma.store_wait(0)


@gluon.jit
def operand_buffers(q_desc, g_desc, k_desc, v_desc, SIZES: gl.constexpr):
    """Allocates the buffers of q and dO, of two tiles of k and of `V_STAGES` tiles of v."""
    STAGES: gl.constexpr = SIZES[2]
    V_STAGES: gl.constexpr = SIZES[4]
    return (
        new_buffers(q_desc, STAGES), new_buffers(g_desc, STAGES), new_buffers(k_desc, 2),
        new_buffers(v_desc, V_STAGES),
    )  # fmt: skip


@gluon.jit
def barriers_of_keys(SIZES: gl.constexpr):
    """Initializes the barriers of a tile of keys: full and free of q and of dO, full of k and v, free of k
    and v."""
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    V_STAGES: gl.constexpr = SIZES[4]
    q_full, q_free = new_ring(STAGES)
    g_full, g_free = new_ring(STAGES)
    k_full, k_free = new_ring(2)
    v_full, v_free = new_ring(V_STAGES)
    init_rings(((q_full, q_free), (g_full, g_free)), STAGES, STRIPS)
    init_rings(((v_full, v_free),), V_STAGES, STRIPS)
    init_rings(((k_full, k_free),), 2, STRIPS)
    fence_async_shared()
    return q_full, q_free, g_full, g_free, k_full, v_full, k_free, v_free


@gluon.jit(do_not_specialize=VARYING)
def backward_kernel(
    q_desc, g_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, items, counter,
    num_items, num_heads, stride_q, stride_g, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes dK and dV [T, H, D], contiguous, and adds dQ to the memory of `dq_desc`.

    One program runs per processor, and `counter` starts at 0. The strides are those of a head, in elements.
    `dq_desc` describes float32 zeros [T, H, D]; it receives dQ without the factor alpha / (2 scale_len), with
    the even columns first in every group of eight.
    """
    STRIPS: gl.constexpr = 2
    SIZES: gl.constexpr = (D, BLOCK_M, STAGES, STRIPS, V_STAGES)
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    dtype: gl.constexpr = q_desc.dtype
    rule = (num_contextual, window, prefix, group_size)
    operands = operand_buffers(q_desc, g_desc, k_desc, v_desc, SIZES)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_buffer = gl.allocate_shared_memory(dtype, [2, STRIPS * STRIP, BLOCK_M], flat)
    part_buffer = new_buffers(dq_desc, STRIPS)
    slots = new_slots(2)
    q_buffer, g_buffer, k_buffer, v_buffer = operands
    buffers = (q_buffer, g_buffer, k_buffer, v_buffer, ds_buffer, part_buffer, slots)
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
            strip, dq_desc, dk_desc, dv_desc, buffers, barriers, items, num_places, num_heads, half_alpha,
            inverse_scale, rule, SIZES, RULE,
        )) if strip < STRIPS else (loading_ahead, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
