"""Computes the outputs: the hand-scheduled (Gluon) forward kernel for Hopper.

One warp loads, two or three warp groups compute. A program works through tiles of rows, each with the blocks
of keys that it sees. A tile is cut into strips of 64 rows, one per warp group. The loading warp runs ahead
through tensor descriptors into `STAGES` buffers for keys and as many for values; barriers in shared memory
say which are full and which are free. It alone reads the list of tiles, and publishes the item of each tile
in shared memory for the warp groups. A warp group keeps its weights in registers, as the left operand of the
second product, and computes them for one block of keys while the tensor cores work on the values of the
previous block. Its rows of q are in registers, too, if they fit.

The descriptors are ragged (`runtime.descriptors`): rows past the end of a sample are read as zeros, whose
weight is silu(0) = 0, and are not written.

Related values travel as tuples, as in `mask_forms`:

    tile      first row in [T], length and first target of the sample; the tile's first token, negative for a
              tile whose first strips lie before the sample and have nothing to do
    runs      the blocks that the tile visits
    buffers   q, k, v and out in shared memory; slots for items of the list
    barriers  full and free of q, k and v
    SIZES     D, BLOCK_N, STAGES, STRIPS, Q_TILES: buffers for tiles of q

No product is in flight at the end of a loop body: ptxas (13.5) would otherwise put a wait behind every
product.

`forward` launches the kernel; the sizes and the order of the work are decided before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
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

from recsys.ops.hstu_attention import mask_forms
from recsys.ops.hstu_attention.mask_forms import rule_of, rules
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.hstu_attention.work_list import kernels as work_item
from recsys.ops.hstu_attention.work_list import row_work
from recsys.ops.hstu_attention.work_list.kernels import (
    COUNT_A,
    COUNT_B,
    COUNT_C,
    FIRST,
    HISTORY_END,
    LENGTH,
    NUM_COLUMNS,
    START,
    START_B,
    START_C,
    UNMASKED_AT,
    UNMASKED_COUNT,
    UNMASKED_START,
)
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import (
    STRIP,
    init_rings,
    load_rows,
    new_buffers,
    new_ring,
    new_slots,
    next_stage,
    opaque,
    skip_blocks,
    store_rows,
    tanh,
)
from recsys.ops.runtime.hopper_launch import launch, programs_for, zero_counter

WARPS = 4
"""Warps per warp group."""

CACHED_BYTES = 24 * 2**20
"""Bytes that the programs work on at a time, in sections of the samples. They stay in the L2 cache of an H100
or H200 (50 and 60 MB, in two halves that may hold the same lines twice)."""


class ForwardSizes(NamedTuple):
    """Sizes of the forward kernel for one head width."""

    keys: int  # BLOCK_N, keys per block
    stages: int  # buffers for blocks of keys, and as many for values
    strips: int  # strips of 64 rows per tile, one warp group each
    held: bool  # whether rows of q are in registers, or else the output leaves through their buffer
    computing_registers: int
    loading_registers: int
    q_tiles: int = 1  # buffers for tiles of rows

    @property
    def rows(self) -> int:
        """Rows per tile."""
        return STRIP.value * self.strips


SIZES = {
    64: ForwardSizes(64, 6, 2, True, 240, 24, 2),
    128: ForwardSizes(64, 4, 2, True, 240, 24, 2),
    256: ForwardSizes(64, 2, 2, False, 232, 40),
}
"""Sizes by head width, in columns. On the diagonal a strip sees one or three quarters of a block of 128 keys,
but half or all of a block of 64 keys."""

LONG_SIZES = {64: ForwardSizes(64, 6, 3, True, 160, 32, 2), 128: ForwardSizes(64, 4, 3, False, 160, 32, 2)}
"""Sizes for rows that see many keys, by head width. Three strips share each block that is read, so a third
less is read, and the tensor cores have work while one strip computes weights. At 128 columns the outputs
leave through the two buffers of q."""

MANY_KEYS, MANY_IN_WINDOW = 192, 1024
"""Average visible keys per row above which `LONG_SIZES` are taken: without a window, and within one. With a
window a tile of more rows visits more blocks that some of its rows do not see.

On an H200 (experiments/2026-11-22-gpu-attention-3) three strips are 1.6 to 5 % faster at 192 to 263 keys and
1 to 9 % slower at 64 to 130. With a window of 512 keys they are 2.5 % slower (4 % at 64 columns), with 1024
as fast, with 2048 2 % faster (6 %).
"""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    sizes: ForwardSizes | None = None,
    *,
    captured: bool = True,
) -> Tensor:
    """Computes `hstu_attention` [T, H, D] in 16 bits without bias; the arguments have been validated.

    Args:
        sizes: overrides the default sizes, for tests.
        captured: whether a compiler may capture this call; the compiler must then know of all memory that is
            kept.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    total_len, num_heads, dim = q.shape
    if total_len == 0:
        return out
    mask = problem.mask
    if sizes is None:
        sizes = sizes_for(dim, average_visible_keys(problem), mask.window)
    q, k, v = with_loadable_rows(q), with_loadable_rows(k), with_loadable_rows(v)
    section = section_of(num_heads * dim * 8, mask)  # q and the output pass through the cache, too
    items = row_work(mask, problem.layout, sizes.rows, sizes.keys, section, problem.tail, STRIP.value)
    rows = (STRIP.value, sizes.keys, sizes.keys)
    loaded = [Boxes(tensor, size, dim) for tensor, size in zip((q, k, v), rows, strict=True)]
    written = [Boxes(out, STRIP.value, dim)]
    constants = partial(forward_constants, dim, sizes, mask)
    launch_items(forward_kernel, items, loaded, written, problem, sizes, constants, captured=captured)
    return out


def launch_items(
    kernel: Any,
    items: Tensor,
    loaded: Sequence[Boxes],
    written: Sequence[Boxes],
    problem: Problem,
    sizes: Any,
    constants: Callable[[], dict[str, Any]],
    *,
    captured: bool,
) -> None:
    """Launches a kernel for the heads of all items of a work list.

    Args:
        loaded: boxes of the tensors [T, H, D] that the kernel loads; it also takes their strides of a head.
        written: boxes of the tensors that it writes.
        sizes: everything besides the mask and the loaded tensors from which `constants` follow.
    """
    first, device = loaded[0].tensor, items.device
    num_heads, dim = first.shape[1:]
    launch(
        kernel,
        (first.dtype, dim, problem.mask, sizes),
        programs_for(device, items.shape[0] * num_heads),
        (*loaded, *written),
        (items, counter_for(device, captured)),
        (items.shape[0], num_heads, *(boxes.tensor.stride(1) for boxes in loaded), *scalars(problem)),
        constants,
    )


def sizes_for(dim: int, seen: float, window: int | None = None) -> ForwardSizes:
    """Returns the sizes of the forward kernel for rows that see `seen` keys on average."""
    many = seen > (MANY_KEYS if window is None else MANY_IN_WINDOW)
    return LONG_SIZES[dim] if many and dim in LONG_SIZES else SIZES[dim]


def average_visible_keys(problem: Problem) -> float:
    """Estimates how many keys a row sees, averaged over the rows of a sample of average length."""
    layout, window = problem.layout, problem.mask.window
    seen = layout.total_len / max(layout.batch_size, 1) / 2
    return min(seen, seen if window is None else window)


def counter_for(device: torch.device, captured: bool) -> Tensor:
    """Returns int32 zeros for one launch to count in."""
    return torch.zeros(4, dtype=torch.int32, device=device) if captured else zero_counter(device)


def forward_constants(dim: int, sizes: ForwardSizes, mask: AttentionMask) -> dict[str, int | bool]:
    """Returns the compile-time constants of the forward kernel, by parameter name."""
    return {
        "D": dim,
        "BLOCK_N": sizes.keys,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "HELD": sizes.held,
        "Q_TILES": sizes.q_tiles,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(mask),
    }


def section_of(token_bytes: int, mask: AttentionMask) -> int | None:
    """Returns the number of tokens per section if each needs `token_bytes` bytes; None with a window, for a
    single section.

    Within a window, neighbors in the list share their operands anyway, and the few tiles of the prefix have
    far more blocks than the rest: they must not wait for the section of their sample.
    """
    return None if mask.window is not None else max(1, CACHED_BYTES // token_bytes)


def scalars(problem: Problem) -> tuple[int | float, ...]:
    """Returns the numbers of a problem in the order of the kernels' parameters, from `half_alpha` to
    `group_size`."""
    rule = rule_of(problem.mask, problem.layout.num_contextual)
    return (0.5 * problem.alpha, 1.0 / problem.scale_len, *rule)


ITEM = gl.constexpr(16)
"""int32 values per slot, at least the columns of the work list, the head, and the place in the list."""

TAKEN_BEFORE = gl.constexpr(8)
"""The loading warp takes the next tile this many blocks before the end of the current one."""

READ_BEFORE = gl.constexpr(5)
"""The loading warp reads the item of the next tile this many blocks before the end of the current one."""

HEAD = gl.constexpr(NUM_COLUMNS.value)

PLACE = gl.constexpr(NUM_COLUMNS.value + 1)

num_masked = gluon.jit(work_item.num_masked.fn)

masked_block = gluon.jit(work_item.masked_block.fn)

visible = gluon.jit(mask_forms.visible.fn)


@gluon.jit
def load_item(items, place, num_places, num_heads):
    """Returns int32 [ITEM], one value per lane: the item at `place` of the list in the format of a slot, or
    the last item for a place past the end of the list. Nothing waits for the load before its first use."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    column = gl.arange(0, ITEM, lanes)
    row = (gl.minimum(place, num_places - 1) // num_heads).to(gl.int64)
    item = gl.load(items + row * NUM_COLUMNS + column, mask=column < NUM_COLUMNS, other=0).to(gl.int32)
    item = gl.where(column == HEAD, place % num_heads, item)
    return gl.where(column == PLACE, place, item)


@gluon.jit
def number_in(slot, column: gl.constexpr):
    single: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(slot.slice(column, 1, 0).load(single), 0)


@gluon.jit
def read_item_slot(slot):
    """Reads from a slot an item's place in the list, its tile, its runs, its first block that needs no mask,
    and its head."""
    tile = (
        number_in(slot, START), number_in(slot, LENGTH), number_in(slot, HISTORY_END), number_in(slot, FIRST),
    )  # fmt: skip
    runs = (
        number_in(slot, COUNT_A), number_in(slot, START_B), number_in(slot, COUNT_B),
        number_in(slot, START_C), number_in(slot, COUNT_C), number_in(slot, UNMASKED_AT),
        number_in(slot, UNMASKED_COUNT),
    )  # fmt: skip
    return number_in(slot, PLACE), tile, runs, number_in(slot, UNMASKED_START), number_in(slot, HEAD)


@gluon.jit
def first_row(strip: gl.constexpr, tile):
    """Returns the first row of a strip. A strip before the sample (see `work_list.row_work`) gets the first
    row behind the sample, so that none of its rows exist."""
    row = tile[3] + strip * STRIP
    return gl.where(row < 0, tile[1], row)


@gluon.jit
def num_blocks(runs):
    return runs[0] + runs[2] + runs[4]


@gluon.jit
def block_at(number, runs, unmasked):
    """Returns the block to visit as number `number`: first the blocks that need the mask, in descending
    order, then the others."""
    masked = num_masked(runs)
    return gl.where(number < masked, masked_block(masked - 1 - number, runs), unmasked + number - masked)


@gluon.jit
def blocks_past(
    strip: gl.constexpr, tile, runs, num_contextual, BLOCK_N: gl.constexpr, CONTEXTUAL_READS: gl.constexpr
):
    """Returns how many of the first blocks in order lie behind everything that the strip sees: all blocks for
    a strip past the end of the sample or before it.

    A row sees nothing behind itself, except that contextual rows see one another, and the history if they
    read it. Blocks between the end of the strip and the end of the tile hold rows of the tile, which see
    themselves, so the tile visits all of them.
    """
    length, history_end = tile[1], tile[2]
    row = first_row(strip, tile)
    end = gl.minimum(row + STRIP, length)
    seen_by_contextual = num_contextual
    if CONTEXTUAL_READS:
        seen_by_contextual = history_end
    end = gl.where(row < num_contextual, gl.maximum(end, seen_by_contextual), end)
    masked = num_masked(runs)
    last = masked_block(masked - 1, runs)
    past = gl.minimum(gl.maximum(last + 1 - (end + BLOCK_N - 1) // BLOCK_N, 0), masked)
    return gl.where(row < length, past, num_blocks(runs))


@gluon.jit
def num_masked_for(strip: gl.constexpr, tile, runs, BLOCK_N: gl.constexpr, RULE: gl.constexpr):
    """Returns how many blocks, in order, come before those of which the strip sees everything.

    Without a window a row sees all history before it. So of the blocks that need the mask for the tile, those
    that end before the strip's first row need no mask for the strip; they are the last ones in order.
    """
    masked = num_masked(runs)
    if RULE[0]:
        return masked
    seen = gl.minimum(tile[3] + strip * STRIP, tile[2]) // BLOCK_N
    return masked - gl.minimum(gl.maximum(gl.minimum(seen, runs[0]) - runs[6], 0), masked)


@gluon.jit
def load_block(descriptor, tile, first, column, cursor, full, free, buffers):
    """Starts `load_rows` into the buffer at the cursor, once it is free."""
    stage, parity = cursor
    mbarrier.wait(free.index(stage), parity)
    load_rows(descriptor, tile, first, column, full.index(stage), buffers.index(stage))


@gluon.jit
def take_place(counter):
    """Takes the next place in the list. Call it late: a place that is taken long before its work begins lets
    other programs move on to other keys, and fewer of the keys are then still in the L2 cache."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def loading_warp(
    q_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads, strides,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Takes tiles in the order of the list, each one when the previous tile is nearly done, publishes their
    items and loads their operands."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    q_buffer, k_buffer, v_buffer, slots = buffers[0], buffers[1], buffers[2], buffers[4]
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    stride_q, stride_k, stride_v = strides
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    place = gl.program_id(0)
    item = load_item(items, place, num_places, num_heads)
    while place < num_places:
        following, next_item = place, item
        slot = slots.index(turn % (2 * Q_TILES))
        slot.store(item)  # the slot's previous item has been read: q was free
        _, tile, runs, unmasked, head = read_item_slot(slot)
        count = num_blocks(runs)
        if count <= TAKEN_BEFORE:
            following = take_place(counter)
        if count > 0:
            first = block_at(0, runs, unmasked) * BLOCK_N
            if Q_TILES == 1:  # with more buffers q is loaded first
                load_block(k_desc, tile, first, head * stride_k, cursor, k_full, k_free, k_buffer)
            for strip in gl.static_range(STRIPS):
                at = turn % Q_TILES * STRIPS + strip
                mbarrier.wait(q_free.index(at), turn // Q_TILES % 2 ^ 1)
                row = first_row(strip, tile)
                load_rows(q_desc, tile, row, head * stride_q, q_full.index(at), q_buffer.index(at))
            turn += 1
            if Q_TILES > 1:
                load_block(k_desc, tile, first, head * stride_k, cursor, k_full, k_free, k_buffer)
            for number in range(1, count):  # the keys of a block are needed, and freed, before its values
                if number == count - TAKEN_BEFORE:
                    following = take_place(counter)
                if number == gl.maximum(count - READ_BEFORE, 3):
                    next_item = load_item(items, following, num_places, num_heads)
                further = next_stage(cursor, STAGES)
                next_first = block_at(number, runs, unmasked) * BLOCK_N
                load_block(k_desc, tile, next_first, head * stride_k, further, k_full, k_free, k_buffer)
                load_block(v_desc, tile, first, head * stride_v, cursor, v_full, v_free, v_buffer)
                cursor, first = further, next_first
            load_block(v_desc, tile, first, head * stride_v, cursor, v_full, v_free, v_buffer)
            cursor = next_stage(cursor, STAGES)
        if count <= 3:
            next_item = load_item(items, following, num_places, num_heads)
        place, item = following, next_item
    slots.index(turn % (2 * Q_TILES)).store(item)
    for strip in gl.static_range(STRIPS):
        at = turn % Q_TILES * STRIPS + strip
        mbarrier.wait(q_free.index(at), turn // Q_TILES % 2 ^ 1)
        mbarrier.arrive(q_full.index(at))


@gluon.jit
def silu(score, half_alpha):
    """Returns silu(2 x) = x + x tanh(x), for x = score * half_alpha."""
    x = score * half_alpha
    return x * tanh(x) + x


@gluon.jit
def apply_mask(score, row, first, tile, rule, RULE: gl.constexpr):
    """Returns the scores, zero where a row does not see the key: silu(0) is 0. `row` and `first` are the
    first row and key of the block."""
    i = row + gl.arange(0, score.shape[0], gl.SliceLayout(1, score.type.layout))
    j = first + gl.arange(0, score.shape[1], gl.SliceLayout(0, score.type.layout))
    seen = visible(gl.expand_dims(i, 1), gl.expand_dims(j, 0), tile[2], rule, RULE)
    return gl.where(seen, score, 0.0)


@gluon.jit
def start_step(total, weight, q, following, cursor, buffers, barriers, nothing, SIZES: gl.constexpr):
    """Starts the scores of the block at `following` and the product with the values of the block at `cursor`.
    Returns the finished scores, and the sum while it is still in flight."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    k = buffers[1].index(following[0]).reshape([BLOCK_N, D]).permute((1, 0))
    v = buffers[2].index(cursor[0]).reshape([BLOCK_N, D])
    mbarrier.wait(barriers[2].index(following[0]), following[1])
    score = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    total = warpgroup_mma(weight, v, total, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(barriers[3].index(following[0]))
    return score, total


@gluon.jit
def finish_step(total, weight, following, cursor, barriers):
    """Waits for the sum of `start_step` and for the values of the next block. `weight` passes through the
    wait so that it is computed during the product: the assembler would sink it behind the wait."""
    mbarrier.wait(barriers[4].index(following[0]), following[1])
    total, weight = warpgroup_mma_wait(0, deps=(total, weight))
    mbarrier.arrive(barriers[5].index(cursor[0]))
    return total, weight


@gluon.jit
def free_rows_before(turn, barriers, strip: gl.constexpr, STRIPS: gl.constexpr, Q_TILES: gl.constexpr):
    """Frees the buffer of q from which the previous tile stores its outputs, once the copy has read it."""
    if turn > 0:
        tma.store_wait(0)
        mbarrier.arrive(barriers[1].index((turn - 1) % Q_TILES * STRIPS + strip))


@gluon.jit
def attend(
    q, turn, cursor, buffers, barriers, strip: gl.constexpr, tile, runs, unmasked, past, half_alpha, rule,
    SIZES: gl.constexpr, RULE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Returns float32 [STRIP, D], the sum over all blocks but the first `past` (at least one is left), and
    the cursor behind the last block. `turn`: the number of the tile in this program."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    dtype: gl.constexpr = q.dtype
    k_full, k_free, v_full, v_free = barriers[2], barriers[3], barriers[4], barriers[5]
    q_free = barriers[1].index(turn % Q_TILES * STRIPS + strip)
    row = tile[3] + strip * STRIP
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    total = gl.zeros([STRIP, D], gl.float32, sums)
    count = num_blocks(runs)
    masked = num_masked_for(strip, tile, runs, BLOCK_N, RULE)
    if HELD:
        q = q.load(gl.DotOperandLayout(0, scores, 2))
        mbarrier.arrive(q_free)

    stage, parity = cursor
    k = buffers[1].index(stage).reshape([BLOCK_N, D]).permute((1, 0))
    mbarrier.wait(k_full.index(stage), parity)
    score = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(k_free.index(stage))
    first = block_at(past, runs, unmasked) * BLOCK_N
    weight = silu(apply_mask(score, row, first, tile, rule, RULE), half_alpha)
    weight = gl.convert_layout(weight.to(dtype), operand)
    if not HELD and Q_TILES > 1:
        free_rows_before(turn, barriers, strip, STRIPS, Q_TILES)
    mbarrier.wait(v_full.index(stage), parity)
    for number in range(past + 1, masked):
        following = next_stage(cursor, STAGES)
        score, total = start_step(total, weight, q, following, cursor, buffers, barriers, nothing, SIZES)
        first = masked_block(num_masked(runs) - 1 - number, runs) * BLOCK_N
        if STRIPS == 3:  # registers are scarce: each row's bounds must not be kept from block to block
            row = opaque(row)
        new = silu(apply_mask(score, row, first, tile, rule, RULE), half_alpha)
        new = gl.convert_layout(new.to(dtype), operand)
        total, weight = finish_step(total, new, following, cursor, barriers)
        cursor = following
    for _number in range(gl.maximum(past + 1, masked), count):
        following = next_stage(cursor, STAGES)
        score, total = start_step(total, weight, q, following, cursor, buffers, barriers, nothing, SIZES)
        new = gl.convert_layout(silu(score, half_alpha).to(dtype), operand)
        total, weight = finish_step(total, new, following, cursor, barriers)
        cursor = following
    stage = cursor[0]
    total = warpgroup_mma(weight, buffers[2].index(stage).reshape([BLOCK_N, D]), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(v_free.index(stage))
    return total, next_stage(cursor, STAGES)


@gluon.jit
def computing_group(
    strip: gl.constexpr, o_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale,
    rule, SIZES: gl.constexpr, RULE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Computes one strip of each tile that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    q_buffer, out_buffer, slots = buffers[0], buffers[3], buffers[4]
    q_full, q_free = barriers[0], barriers[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(q_full.index(strip), 0)
    place, tile, runs, unmasked, head = read_item_slot(slots.index(0))
    while place < num_places:
        past = blocks_past(strip, tile, runs, rule[0], BLOCK_N, RULE[3])
        cursor = skip_blocks(past, cursor, barriers[2:6], SIZES[2])
        at = turn % Q_TILES * STRIPS + strip
        total = gl.zeros([STRIP, D], gl.float32, sums)
        if past < num_blocks(runs):
            q = q_buffer.index(at).reshape([STRIP, D])
            total, cursor = attend(
                q, turn, cursor, buffers, barriers, strip, tile, runs, unmasked, past,
                half_alpha, rule, SIZES, RULE, HELD,
            )  # fmt: skip
        elif HELD:
            mbarrier.arrive(q_free.index(at))
        elif Q_TILES > 1:
            free_rows_before(turn, barriers, strip, STRIPS, Q_TILES)
        # Where registers are scarce, reread what the loops do not need. (With one buffer for tiles of q, the
        # slot might already hold the item after the next one.)
        if STRIPS == 3 and D > 64 and Q_TILES > 1:
            _, tile, _, _, head = read_item_slot(slots.index(turn % (2 * Q_TILES)))
        buffer = out_buffer.index(strip if HELD else at)
        if HELD:
            tma.store_wait(0)  # the rows of the previous tile have left the buffer
        # A strip past the end of the sample, or before it, stores too: all of its rows are out of bounds, so
        # nothing is written.
        buffer.reshape([STRIP, D]).store((total * inverse_scale).to(q_buffer.dtype))
        fence_async_shared()
        store_rows(o_desc, tile, first_row(strip, tile), 0, head * D, buffer)
        if not HELD and Q_TILES == 1:  # with more buffers the next tile uses another one
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(at))
        turn += 1
        mbarrier.wait(q_full.index(turn % Q_TILES * STRIPS + strip), turn // Q_TILES % 2)
        place, tile, runs, unmasked, head = read_item_slot(slots.index(turn % (2 * Q_TILES)))
    tma.store_wait(0)


@gluon.jit
def barriers_of_rows(SIZES: gl.constexpr):
    """Initializes the barriers of a tile of rows: full and free of q, k and v."""
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    q_full, q_free = new_ring(Q_TILES * STRIPS)
    k_full, k_free = new_ring(STAGES)
    v_full, v_free = new_ring(STAGES)
    init_rings(((q_full, q_free),), Q_TILES * STRIPS, 1)
    init_rings(((k_full, k_free), (v_full, v_free)), STAGES, STRIPS)
    fence_async_shared()
    return q_full, q_free, k_full, k_free, v_full, v_free


@gluon.jit(
    do_not_specialize=[
        "num_items", "num_heads", "stride_q", "stride_k", "stride_v",
        "num_contextual", "window", "prefix", "group_size",
    ],
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, items, counter, num_items, num_heads, stride_q, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    HELD: gl.constexpr, Q_TILES: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes out [T, H, D], contiguous. One program runs per processor, and `counter` starts at 0. The
    strides are those of a head, in elements. HELD: rows of q are in registers and leave their buffer to the
    next ones; otherwise the output leaves through it."""
    SIZES: gl.constexpr = (D, BLOCK_N, STAGES, STRIPS, Q_TILES)
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    rule = (num_contextual, window, prefix, group_size)
    q_buffer = new_buffers(q_desc, Q_TILES * STRIPS)
    k_buffer = new_buffers(k_desc, STAGES)
    v_buffer = new_buffers(v_desc, STAGES)
    out_buffer = q_buffer
    if HELD:
        out_buffer = new_buffers(o_desc, STRIPS)
    slots = new_slots(2 * Q_TILES, ITEM)
    buffers = (q_buffer, k_buffer, v_buffer, out_buffer, slots)
    barriers = barriers_of_rows(SIZES)
    num_places = num_items * num_heads
    loading = (
        q_desc, k_desc, v_desc, buffers, barriers, items, counter, num_places, num_heads,
        (stride_q, stride_k, stride_v), SIZES,
    )  # fmt: skip
    gl.static_assert(STRIPS == 2 or STRIPS == 3)
    # The tuple must be a literal: with a name, or added to another, it would lose the compile-time values of
    # its members.
    gl.warp_specialize([
        (computing_group, (
            strip, o_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale, rule,
            SIZES, RULE, HELD,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2, 3)[:STRIPS + 1]
    ], [4] * (STRIPS - 1) + [1], [COMPUTING_REGISTERS] * (STRIPS - 1) + [LOADING_REGISTERS])  # fmt: skip
