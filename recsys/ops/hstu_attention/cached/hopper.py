"""Scores candidates on cached histories: a hand-scheduled (Gluon) Hopper kernel for new tokens that are all
targets.

The kernel is a variant of `hopper.forward` and uses its parts. Each new token sees all cached tokens of its
sample and its own target group. So a tile of rows visits all blocks of cached keys without a mask (rows past
the end of a sample are read as zeros, whose weight is silu(0) = 0), and then, under the mask, the blocks of
new keys from the start of its first row's group.

Two warp groups have enough registers to compute the weights of one block during the products of another. Four
do not, and need not: each waits for its products while the others work.
"""

from __future__ import annotations

from typing import NamedTuple

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

from recsys.ops.hstu_attention.hopper.forward import barriers_of_rows, finish_step, silu, start_step
from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.hstu_attention.work_list import cached_work
from recsys.ops.hstu_attention.work_list.kernels import (
    CACHE_LENGTH,
    CACHE_START,
    FIRST,
    LENGTH,
    NUM_CACHED_COLUMNS,
    START,
)
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import (
    RAGGED_ROWS,
    STRIP,
    load_rows,
    new_buffers,
    new_slots,
    next_stage,
    publish,
    read_slot,
    skip_blocks,
)
from recsys.ops.runtime.hopper_launch import launch, programs_for, zero_counter
from recsys.ops.runtime.triton_support import num_processors

WARPS = 4
"""Warps per strip."""


class CandidateSizes(NamedTuple):
    """Sizes of the kernel for one head width."""

    keys: int  # BLOCK_N, keys per block
    stages: int  # buffers for blocks of keys, and as many for values
    strips: int = 2  # strips of 64 rows per tile, one warp group each
    computing_registers: int = 240
    loading_registers: int = 24


SIZES = {64: CandidateSizes(128, 3), 128: CandidateSizes(128, 2)}
"""Sizes by head width, in columns."""

LARGE_SIZES = {64: CandidateSizes(64, 4, strips=4, computing_registers=112)}
"""Sizes, by head width, for so many candidates that tiles of twice as many rows still occupy the GPU: four
warp groups fill one another's gaps better than two."""


def sizes_for(dim: int, num_rows: int, num_heads: int, processors: int) -> CandidateSizes:
    """Returns the sizes with which the last processor finishes first, assuming full tiles and samples of
    equal length."""
    small, large = SIZES[dim], LARGE_SIZES.get(dim)
    if large is None:
        return small
    passes = [
        -(-num_rows * num_heads // (STRIP.value * sizes.strips * processors)) * sizes.strips
        for sizes in (small, large)
    ]
    return large if passes[1] <= passes[0] else small


def run(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem) -> Tensor:
    """Runs the kernel: scores and sums are float32, weights are rounded to the dtype of v."""
    return forward(q, k, v, cache_k, cache_v, problem)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    problem: CachedProblem,
    sizes: CandidateSizes | None = None,
) -> Tensor:
    """Computes `hstu_attention_cached` [T, H, D] in 16 bits without bias, for new tokens that are all
    targets and see everything cached; the arguments have been validated. `sizes` overrides the defaults,
    for tests."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    total_len, num_heads, dim = q.shape
    if total_len == 0:
        return out
    if sizes is None:
        sizes = sizes_for(dim, total_len, num_heads, num_processors(q.device))
    if cache_k.shape[0] == 0:  # a tensor map needs an address, though nothing is read there
        cache_k, cache_v = k, v
    q, k, v, cache_k, cache_v = map(with_loadable_rows, (q, k, v, cache_k, cache_v))
    mask = problem.mask
    items = cached_work(mask, problem.layout, problem.cache_layout, STRIP.value * sizes.strips, sizes.keys)
    grouped = mask.target_group_size > 1
    launch(
        candidates_kernel,
        (q.dtype, dim, sizes, grouped),
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, STRIP.value, dim),
            Boxes(k, sizes.keys, dim),
            Boxes(v, sizes.keys, dim),
            Boxes(cache_k, sizes.keys, dim),
            Boxes(cache_v, sizes.keys, dim),
            Boxes(out, STRIP.value, dim),
        ),
        (items, zero_counter(q.device)),
        (
            items.shape[0],
            num_heads,
            *(tensor.stride(1) for tensor in (q, k, v, cache_k, cache_v)),
            0.5 * problem.alpha,
            1.0 / problem.scale_len,
            mask.target_group_size,
        ),
        lambda: {
            "D": dim,
            "BLOCK_N": sizes.keys,
            "STAGES": sizes.stages,
            "STRIPS": sizes.strips,
            "GROUPED": grouped,
            "COMPUTING_REGISTERS": sizes.computing_registers,
            "LOADING_REGISTERS": sizes.loading_registers,
            "num_warps": WARPS,
        },
    )
    return out


@gluon.jit
def fetch(items, place, num_heads, group_size, SIZES: gl.constexpr, GROUPED: gl.constexpr):
    """Reads the item at `place` of the list. Returns the tile (start and length of the sample's new tokens,
    first token of the tile), the cache (start and length of the cached tokens), the blocks (first block of
    new keys, their number, number of all blocks), and the head."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STRIPS: gl.constexpr = SIZES[3]
    item = items + (place // num_heads).to(gl.int64) * NUM_CACHED_COLUMNS
    start = gl.load(item + START)
    length = gl.load(item + LENGTH).to(gl.int32)
    first = gl.load(item + FIRST).to(gl.int32)
    cache_start = gl.load(item + CACHE_START)
    cache_length = gl.load(item + CACHE_LENGTH).to(gl.int32)
    group = first
    if GROUPED:
        group = first // group_size * group_size
    new_first = group // BLOCK_N
    end = gl.minimum(first + STRIPS * STRIP, length)
    new_count = gl.where(length > 0, (end + BLOCK_N - 1) // BLOCK_N - new_first, 0)
    # Where nothing is cached, visit one block of zeros, read from past the end of the empty cache.
    cached_count = gl.maximum((cache_length + BLOCK_N - 1) // BLOCK_N, 1)
    count = new_count + gl.where(length > 0, cached_count, 0)
    tile, cache, blocks = (start, length, first), (cache_start, cache_length), (new_first, new_count, count)
    return tile, cache, blocks, place % num_heads


@gluon.jit
def load_block(
    number, new_desc, cache_desc, columns, tile, cache, blocks, full, buffer, BLOCK_N: gl.constexpr
):
    """Loads the block visited as number `number`. `columns`: the head's first column in the new and the
    cached tensor."""
    new_first, new_count, count = blocks
    if number < count - new_count:
        load_rows(cache_desc, cache, number * BLOCK_N, columns[1], full, buffer)
    else:
        block = new_first + number - (count - new_count)
        load_rows(new_desc, tile, block * BLOCK_N, columns[0], full, buffer)


@gluon.jit
def loading_warp(
    q_desc, new_descs, cache_descs, buffers, barriers, items, counter, num_places, num_heads, strides,
    group_size, SIZES: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Takes tiles in the order of the list, one after the other, and loads their operands."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    q_buffer, k_buffer, v_buffer, slots = buffers[0], buffers[1], buffers[2], buffers[4]
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    stride_q, stride_k, stride_v, stride_ck, stride_cv = strides
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    place = gl.program_id(0)
    while place < num_places:
        tile, cache, blocks, head = fetch(items, place, num_heads, group_size, SIZES, GROUPED)
        following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        count = blocks[2]
        k_columns, v_columns = (head * stride_k, head * stride_ck), (head * stride_v, head * stride_cv)
        if count > 0:
            publish(place, slots.index(turn % (2 * Q_TILES)))  # the slot was read before q became free
            for strip in gl.static_range(STRIPS):
                at = turn % Q_TILES * STRIPS + strip
                mbarrier.wait(q_free.index(at), turn // Q_TILES % 2 ^ 1)
                row = tile[2] + strip * STRIP
                load_rows(q_desc, tile, row, head * stride_q, q_full.index(at), q_buffer.index(at))
            turn += 1
            mbarrier.wait(k_free.index(cursor[0]), cursor[1])
            load_block(
                0, new_descs[0], cache_descs[0], k_columns, tile, cache, blocks,
                k_full.index(cursor[0]), k_buffer.index(cursor[0]), BLOCK_N,
            )  # fmt: skip
            for number in range(1, count):  # the keys of a block are needed, and freed, before its values
                stage, parity = next_stage(cursor, STAGES)
                mbarrier.wait(k_free.index(stage), parity)
                load_block(
                    number, new_descs[0], cache_descs[0], k_columns, tile, cache, blocks,
                    k_full.index(stage), k_buffer.index(stage), BLOCK_N,
                )  # fmt: skip
                mbarrier.wait(v_free.index(cursor[0]), cursor[1])
                load_block(
                    number - 1, new_descs[1], cache_descs[1], v_columns, tile, cache, blocks,
                    v_full.index(cursor[0]), v_buffer.index(cursor[0]), BLOCK_N,
                )  # fmt: skip
                cursor = (stage, parity)
            mbarrier.wait(v_free.index(cursor[0]), cursor[1])
            load_block(
                count - 1, new_descs[1], cache_descs[1], v_columns, tile, cache, blocks,
                v_full.index(cursor[0]), v_buffer.index(cursor[0]), BLOCK_N,
            )  # fmt: skip
            cursor = next_stage(cursor, STAGES)
        place = following
    publish(place, slots.index(turn % (2 * Q_TILES)))
    for strip in gl.static_range(STRIPS):
        at = turn % Q_TILES * STRIPS + strip
        mbarrier.wait(q_free.index(at), turn // Q_TILES % 2 ^ 1)
        mbarrier.arrive(q_full.index(at))


@gluon.jit
def apply_mask(score, i, first, group_size, GROUPED: gl.constexpr):
    """Returns the scores, zero where the new row `i` does not see the new key: silu(0) is 0. `first` is the
    block's first key."""
    keys: gl.constexpr = gl.SliceLayout(0, score.type.layout)
    j = gl.expand_dims(first + gl.arange(0, score.shape[1], keys), 0)
    i = gl.expand_dims(i, 1)
    seen = i == j
    if GROUPED:
        seen = (j <= i) & (j >= i // group_size * group_size)
    return gl.where(seen, score, 0.0)


@gluon.jit
def attend(
    q, q_free, cursor, buffers, barriers, strip: gl.constexpr, tile, blocks, half_alpha, group_size,
    SIZES: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Returns float32 [STRIP, D], the sum over all blocks that the strip sees, and the cursor behind the
    tile's last block."""
    D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    dtype: gl.constexpr = q.dtype
    k_full, k_free, v_full, v_free = barriers[2], barriers[3], barriers[4], barriers[5]
    new_first, new_count, count = blocks
    row = tile[2] + strip * STRIP
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    total = gl.zeros([STRIP, D], gl.float32, sums)

    stage, parity = cursor
    mbarrier.wait(k_full.index(stage), parity)
    k = buffers[1].index(stage).reshape([BLOCK_N, D]).permute((1, 0))
    score = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(k_free.index(stage))
    weight = gl.convert_layout(silu(score, half_alpha).to(dtype), operand)
    mbarrier.wait(v_full.index(stage), parity)
    for _number in range(1, count - new_count):
        following = next_stage(cursor, STAGES)
        if STRIPS == 2:
            score, total = start_step(total, weight, q, following, cursor, buffers, barriers, nothing, SIZES)
            new = gl.convert_layout(silu(score, half_alpha).to(dtype), operand)
            total, weight = finish_step(total, new, following, cursor, barriers)
        else:
            k = buffers[1].index(following[0]).reshape([BLOCK_N, D]).permute((1, 0))
            v = buffers[2].index(cursor[0]).reshape([BLOCK_N, D])
            mbarrier.wait(k_full.index(following[0]), following[1])
            score = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            total = warpgroup_mma(weight, v, total, is_async=True)
            score, total = warpgroup_mma_wait(0, deps=(score, total))
            mbarrier.arrive(k_free.index(following[0]))
            mbarrier.arrive(v_free.index(cursor[0]))
            weight = gl.convert_layout(silu(score, half_alpha).to(dtype), operand)
            mbarrier.wait(v_full.index(following[0]), following[1])
        cursor = following
    stage = cursor[0]
    v = buffers[2].index(stage).reshape([BLOCK_N, D])
    total = warpgroup_mma(weight, v, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(v_free.index(stage))
    cursor = next_stage(cursor, STAGES)

    i = row + gl.arange(0, STRIP, gl.SliceLayout(1, scores))
    group = row
    if GROUPED:
        group = row // group_size * group_size
    seen = group // BLOCK_N
    past = (gl.minimum(row + STRIP, tile[1]) + BLOCK_N - 1) // BLOCK_N
    cursor = skip_blocks(seen - new_first, cursor, barriers[2:6], STAGES)
    for block in range(seen, past):
        stage, parity = cursor
        mbarrier.wait(k_full.index(stage), parity)
        k = buffers[1].index(stage).reshape([BLOCK_N, D]).permute((1, 0))
        score = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        mbarrier.arrive(k_free.index(stage))
        weight = silu(apply_mask(score, i, block * BLOCK_N, group_size, GROUPED), half_alpha)
        weight = gl.convert_layout(weight.to(dtype), operand)
        mbarrier.wait(v_full.index(stage), parity)
        v = buffers[2].index(stage).reshape([BLOCK_N, D])
        total = warpgroup_mma(weight, v, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(v_free.index(stage))
        cursor = next_stage(cursor, STAGES)
    cursor = skip_blocks(new_first + new_count - past, cursor, barriers[2:6], STAGES)
    mbarrier.arrive(q_free)
    return total, cursor


@gluon.jit
def computing_group(
    strip: gl.constexpr, o_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale,
    group_size, SIZES: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Computes one strip of each tile that the loading warp publishes."""
    D: gl.constexpr = SIZES[0]
    STRIPS: gl.constexpr = SIZES[3]
    Q_TILES: gl.constexpr = SIZES[4]
    q_buffer, out_buffer, slots = buffers[0], buffers[3], buffers[4]
    q_full, q_free = barriers[0], barriers[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    mbarrier.wait(q_full.index(strip), 0)
    place = read_slot(slots.index(0))
    tile, _cache, blocks, head = fetch(
        items, gl.minimum(place, num_places - 1), num_heads, group_size, SIZES, GROUPED
    )
    while place < num_places:
        at = turn % Q_TILES * STRIPS + strip
        column = head * D
        rows = RAGGED_ROWS - tile[1] + tile[2] + strip * STRIP
        end = tile[0].to(gl.int32) + tile[1]
        total = gl.zeros([STRIP, D], gl.float32, sums)
        if tile[2] + strip * STRIP < tile[1]:
            q = q_buffer.index(at).reshape([STRIP, D])
            total, cursor = attend(
                q, q_free.index(at), cursor, buffers, barriers, strip, tile, blocks, half_alpha, group_size,
                SIZES, GROUPED,
            )  # fmt: skip
        else:  # the strip lies past the end of the sample
            cursor = skip_blocks(blocks[2], cursor, barriers[2:6], SIZES[2])
            mbarrier.arrive(q_free.index(at))
        turn += 1
        following = turn % Q_TILES * STRIPS + strip
        mbarrier.wait(q_full.index(following), turn // Q_TILES % 2)  # early: the next item is on its way
        place = read_slot(slots.index(turn % (2 * Q_TILES)))
        tile, _cache, blocks, head = fetch(
            items, gl.minimum(place, num_places - 1), num_heads, group_size, SIZES, GROUPED
        )
        buffer = out_buffer.index(strip)
        tma.store_wait(0)  # the rows of the previous tile have left the buffer
        # A strip past the end of the sample stores too: all of its rows are out of bounds, so nothing is
        # written.
        buffer.reshape([STRIP, D]).store((total * inverse_scale).to(q_buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [RAGGED_ROWS, end, rows, column], buffer)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_items", "num_heads", "stride_q", "stride_k", "stride_v", "stride_ck", "stride_cv", "group_size",
    ],
)  # fmt: skip
def candidates_kernel(
    q_desc, k_desc, v_desc, ck_desc, cv_desc, o_desc, items, counter, num_items, num_heads,
    stride_q, stride_k, stride_v, stride_ck, stride_cv, half_alpha, inverse_scale, group_size,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    GROUPED: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Computes out [T, H, D], contiguous, for the new tokens. One program runs per processor, and `counter`
    starts at 0. The strides are those of a head, in elements."""
    Q_TILES: gl.constexpr = 2  # buffers for tiles of rows
    SIZES: gl.constexpr = (D, BLOCK_N, STAGES, STRIPS, Q_TILES)
    q_buffer = new_buffers(q_desc, Q_TILES * STRIPS)
    k_buffer = new_buffers(k_desc, STAGES)
    v_buffer = new_buffers(v_desc, STAGES)
    out_buffer = new_buffers(o_desc, STRIPS)
    slots = new_slots(2 * Q_TILES)
    buffers = (q_buffer, k_buffer, v_buffer, out_buffer, slots)
    barriers = barriers_of_rows(SIZES)
    num_places = num_items * num_heads
    loading = (
        q_desc, (k_desc, v_desc), (ck_desc, cv_desc), buffers, barriers, items, counter, num_places,
        num_heads, (stride_q, stride_k, stride_v, stride_ck, stride_cv), group_size, SIZES, GROUPED,
    )  # fmt: skip
    gl.static_assert(STRIPS == 2 or STRIPS == 4)
    # The tuple must be a literal: with a name, or added to another, it would lose the compile-time values of
    # its members.
    gl.warp_specialize([
        (computing_group, (
            strip, o_desc, buffers, barriers, items, num_places, num_heads, half_alpha, inverse_scale,
            group_size, SIZES, GROUPED,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2, 3, 4)[:STRIPS + 1]
    ], [4] * (STRIPS - 1) + [1], [COMPUTING_REGISTERS] * (STRIPS - 1) + [LOADING_REGISTERS])  # fmt: skip
