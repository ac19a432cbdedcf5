"""Hand-scheduled (Gluon) Hopper kernels of `linear_logp`: one warp loads, warp groups compute.

A program takes units of work one after the other. A unit is a tile of rows of one operand, called `owned`,
and a part of the blocks of rows of the other operand, called `streamed`. `owned` is hidden and `streamed` the
weight, or the reverse (OF_WEIGHT). A tile is cut into strips of 64 rows, one per warp group. The loading warp
runs ahead through tensor descriptors into `STAGES` buffers; barriers in shared memory say which buffers are
full and which are free. Products are summed in float32. In backward a warp group keeps the gradients of the
scores in registers, as the left operand of the second product, and computes them for one block while the
tensor cores work on the previous block: a block of `streamed` serves both products from one buffer.

i counts rows of hidden, j rows of the weight. Descriptors are ragged (`runtime.descriptors`): rows past the
end are zeros.

Related values travel as tuples:

    work      number of rows of owned and of streamed; tiles of owned, units, blocks per part
    vectors   top, sign, of_target, rows: one value per row of hidden, padded to whole tiles
    buffers   owned and streamed in shared memory; two pairs of vectors per strip
    barriers  full and free of owned and streamed
    SIZES     BLOCK_D, BLOCK_N, STAGES, STRIPS
    KIND      OF_WEIGHT, HAS_TARGET, WITH_SCALE

No product is in flight at the end of a loop body: ptxas (13.5) would otherwise put a wait behind every
product.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recsys.ops.runtime.gluon_pieces import RAGGED_ROWS, STRIP, next_stage

LOG2E = gl.constexpr(math.log2(math.e))


@gluon.jit
def exp2(x):
    """Returns 2^x, computed in one instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def extent(unit, work, BLOCK_N: gl.constexpr):
    """Returns a unit's tile, its part, its first block, and the block after its last."""
    num_streamed, num_tiles, per_part = work[1], work[2], work[4]
    part = unit // num_tiles
    start = part * per_part
    end = gl.minimum(start + per_part, (num_streamed + BLOCK_N - 1) // BLOCK_N)
    return unit % num_tiles, part, start, end


@gluon.jit
def load_rows(descriptor, first, count, full, buffer):
    """Starts to load rows from `first` on, out of `count` rows, into `buffer`; the barrier `full` expects
    them."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    rows = RAGGED_ROWS - count + first
    tma.async_copy_global_to_shared(descriptor, [RAGGED_ROWS, count, rows, 0], full, buffer)


@gluon.jit
def loading_warp(owned_desc, streamed_desc, buffers, barriers, work, SIZES: gl.constexpr):
    """Loads the operands of this program's units in order."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    owned_buffer, streamed_buffer = buffers[0], buffers[1]
    owned_full, owned_free, full, free = barriers
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, _, start, end = extent(unit, work, BLOCK_N)
        for strip in gl.static_range(STRIPS):
            mbarrier.wait(owned_free.index(strip), turn % 2 ^ 1)
            row = (tile * STRIPS + strip) * STRIP
            load_rows(owned_desc, row, work[0], owned_full.index(strip), owned_buffer.index(strip))
        for block in range(start, end):
            stage, parity = cursor
            mbarrier.wait(free.index(stage), parity)
            load_rows(
                streamed_desc, block * BLOCK_N, work[1], full.index(stage), streamed_buffer.index(stage)
            )
            cursor = next_stage(cursor, STAGES)
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit
def add_scores(best, sums, score, block, work, power):
    """Merges a block of scores into the maximum and the sum of the scaled scores of some rows."""
    BLOCK_N: gl.constexpr = score.shape[1]
    if block * BLOCK_N + BLOCK_N > work[1]:
        j = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
        score = gl.where(gl.expand_dims(j, 0) < work[1], score, float("-inf"))
    better = gl.maximum(best, gl.max(score, 1))
    top = better * power
    sums = sums * exp2(best * power - top) + gl.sum(exp2(score * power - gl.expand_dims(top, 1)), 1)
    return better, sums


@gluon.jit
def summing_group(
    strip: gl.constexpr, maximum, total, buffers, barriers, work, power, scale, SIZES: gl.constexpr
):
    """Computes the maximum and sum of the scaled scores of one strip, for each unit."""
    BLOCK_D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    owned_full, owned_free, full, free = barriers
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, part, start, end = extent(unit, work, BLOCK_N)
        mbarrier.wait(owned_full.index(strip), turn % 2)
        owned = buffers[0].index(strip).reshape([STRIP, BLOCK_D])
        best = gl.full([STRIP], float("-inf"), gl.float32, rows)
        sums = gl.zeros([STRIP], gl.float32, rows)
        for block in range(start, end):
            stage, parity = cursor
            streamed = buffers[1].index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
            mbarrier.wait(full.index(stage), parity)
            score = warpgroup_mma(owned, streamed, nothing, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
            mbarrier.arrive(free.index(stage))
            best, sums = add_scores(best, sums, score, block, work, power)
            cursor = next_stage(cursor, STAGES)
        mbarrier.arrive(owned_free.index(strip))
        i = (tile * STRIPS + strip) * STRIP + gl.arange(0, STRIP, rows)
        out = part.to(gl.int64) * work[0] + i
        gl.store(maximum + out, best * scale, mask=i < work[0])
        gl.store(total + out, sums, mask=i < work[0])
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit(do_not_specialize=["num_owned", "num_streamed", "num_tiles", "num_units", "per_part"])
def forward_kernel(
    owned_desc, streamed_desc, scale, maximum, total, num_owned, num_streamed, num_tiles, num_units, per_part,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes maximum and total [parts, num_owned] float32 of the scaled scores for each part of the
    candidates.

    scale: [1] float32. A unit is a tile of hidden and a part of the weight; tiles vary fastest, so that
        concurrent programs share candidates.
    """
    SIZES: gl.constexpr = (BLOCK_D, BLOCK_N, STAGES, STRIPS)
    buffers, barriers = prepared(owned_desc, streamed_desc, SIZES, 1)
    work = (num_owned, num_streamed, num_tiles, num_units, per_part)
    factor = gl.load(scale)
    power = factor * LOG2E
    loading = (owned_desc, streamed_desc, buffers, barriers, work, SIZES)
    gl.static_assert(STRIPS == 2 or STRIPS == 4)
    # The tuple must be a literal: with a name, or added to another, it would lose the compile-time values of
    # its members.
    gl.warp_specialize([
        (summing_group, (strip, maximum, total, buffers, barriers, work, power, factor, SIZES))
        if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2, 3, 4)[:STRIPS + 1]
    ], [4] * (STRIPS - 1) + [1], [COMPUTING_REGISTERS] * (STRIPS - 1) + [LOADING_REGISTERS])  # fmt: skip


@gluon.jit
def prepared(owned_desc, streamed_desc, SIZES: gl.constexpr, CHUNKS: gl.constexpr):
    """Allocates buffers for the operands, `CHUNKS` per strip, and initializes their barriers."""
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    owned_buffer = gl.allocate_shared_memory(
        owned_desc.dtype, [STRIPS * CHUNKS] + owned_desc.block_shape, owned_desc.layout
    )
    streamed_buffer = gl.allocate_shared_memory(
        streamed_desc.dtype, [STAGES] + streamed_desc.block_shape, streamed_desc.layout
    )
    owned_full = gl.allocate_shared_memory(gl.int64, [STRIPS, 1], mbarrier.MBarrierLayout())
    owned_free = gl.allocate_shared_memory(gl.int64, [STRIPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for strip in gl.static_range(STRIPS):
        mbarrier.init(owned_full.index(strip), count=1)
        mbarrier.init(owned_free.index(strip), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=STRIPS)
    fence_async_shared()
    return (owned_buffer, streamed_buffer), (owned_full, owned_free, full, free)


@gluon.jit
def fetch_vectors(block, vectors, BLOCK_N: gl.constexpr):
    """Loads `top` and `sign` of a block of rows of hidden, about one number per thread."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = block * BLOCK_N + gl.arange(0, BLOCK_N, line)
    return gl.load(vectors[0] + i), gl.load(vectors[1] + i)


@gluon.jit
def score_grads(
    score, strip: gl.constexpr, tile, block, mine, keep, place, vectors, work, power,
    SIZES: gl.constexpr, KIND: gl.constexpr, SPECIAL: gl.constexpr,
):  # fmt: skip
    """Computes dz for a block of scores, without the row's sign where a program owns rows of hidden.

    `mine`: `top` of the strip's rows of hidden. `keep` holds `top` and `sign` of the block's rows, from index
    `place` on. SPECIAL: the block holds targets or reaches past the last candidate.
    """
    BLOCK_N: gl.constexpr = SIZES[1]
    STRIPS: gl.constexpr = SIZES[3]
    OF_WEIGHT: gl.constexpr = KIND[0]
    HAS_TARGET: gl.constexpr = KIND[1]
    columns: gl.constexpr = gl.SliceLayout(0, score.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, score.type.layout)
    if OF_WEIGHT:
        top = gl.expand_dims(keep.index(place).load(columns), 0)
        sign = gl.expand_dims(keep.index(place + 1).load(columns), 0)
        slope = exp2(score * power - top) * sign
    else:
        slope = exp2(score * power - gl.expand_dims(mine, 1))
    if SPECIAL:
        theirs = block * BLOCK_N + gl.arange(0, BLOCK_N, columns)
        owned = (tile * STRIPS + strip) * STRIP + gl.arange(0, STRIP, rows)
        if HAS_TARGET:
            if OF_WEIGHT:
                target = gl.expand_dims(gl.load(vectors[3] + theirs), 0)
                of_target = gl.expand_dims(gl.load(vectors[2] + theirs), 0)
                slope = gl.where(gl.expand_dims(owned, 1) == target, of_target, slope)
            else:
                target = gl.expand_dims(gl.load(vectors[3] + owned), 1)
                of_target = gl.expand_dims(gl.load(vectors[2] + owned) * gl.load(vectors[1] + owned), 1)
                slope = gl.where(gl.expand_dims(theirs, 0) == target, of_target, slope)
        if not OF_WEIGHT:
            slope = gl.where(gl.expand_dims(theirs, 0) < work[1], slope, 0.0)
    return slope


@gluon.jit
def is_special(owned_marks, block, work, BLOCK_N: gl.constexpr, KIND: gl.constexpr):
    """Returns nonzero if a block holds targets or ends behind the last candidate, so that single scores need
    care."""
    special = (gl.to_tensor(0) != 0).to(gl.int32)
    if not KIND[0]:
        special = ((block + 1) * BLOCK_N > work[1]).to(gl.int32)
    if KIND[1]:
        blocks = (work[1] + BLOCK_N - 1) // BLOCK_N
        special = special | gl.load(owned_marks + gl.minimum(block, blocks - 1)).to(gl.int32)
    return special


@gluon.jit
def advance(
    total, slope, scale_sum, ahead, owned, following, cursor, strip: gl.constexpr, tile, block, mine, keep,
    place, buffers, barriers, vectors, work, power, nothing,
    SIZES: gl.constexpr, KIND: gl.constexpr, SPECIAL: gl.constexpr,
):  # fmt: skip
    """Adds the product of the block at `cursor` with its `slope`, and computes the slope of `block`, whose
    operand is at `following`. `ahead` holds the vectors of `block`; the returned `ahead` holds those of the
    next block."""
    BLOCK_D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    sums: gl.constexpr = total.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    full, free = barriers[2], barriers[3]
    streamed = buffers[1].index(following[0]).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    score = warpgroup_mma(owned, streamed, nothing, use_acc=False, is_async=True)
    value = buffers[1].index(cursor[0]).reshape([BLOCK_N, BLOCK_D])
    total = warpgroup_mma(slope, value, total, is_async=True)
    if KIND[0]:
        keep.index(place).store(ahead[0])
        keep.index(place + 1).store(ahead[1])
        blocks = (work[1] + BLOCK_N - 1) // BLOCK_N
        ahead = fetch_vectors(gl.minimum(block + 1, blocks - 1), vectors, BLOCK_N)
    score = warpgroup_mma_wait(1, deps=(score,))
    wide = score_grads(
        score, strip, tile, block, mine, keep, place, vectors, work, power, SIZES, KIND, SPECIAL
    )  # fmt: skip
    if KIND[2]:
        scale_sum += gl.sum(wide * score, 1)
    new = gl.convert_layout(wide.to(owned.dtype), operand)
    # This barrier has already completed. Waiting again keeps the assembler from sinking all of `new` behind
    # the next wait, where it would no longer overlap the product.
    mbarrier.wait(full.index(following[0]), following[1])
    total, new = warpgroup_mma_wait(0, deps=(total, new))
    mbarrier.arrive(free.index(cursor[0]))
    return total, new, scale_sum, ahead


@gluon.jit
def adding_group(
    strip: gl.constexpr, grad, grad_scale, marks, buffers, barriers, keep, vectors, work, width, power, scale,
    SIZES: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Computes the gradient of one strip, for each unit."""
    BLOCK_D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    OF_WEIGHT: gl.constexpr = KIND[0]
    WITH_SCALE: gl.constexpr = KIND[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    owned_full, owned_free, full, free = barriers
    owned_rows = buffers[0].index(strip).reshape([STRIP, BLOCK_D])
    blocks = (work[1] + BLOCK_N - 1) // BLOCK_N
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, part, start, end = extent(unit, work, BLOCK_N)
        owned_marks = marks + tile.to(gl.int64) * blocks
        total = gl.zeros([STRIP, BLOCK_D], gl.float32, sums)
        scale_sum = gl.zeros([STRIP], gl.float32, rows)
        row = (tile * STRIPS + strip) * STRIP
        mine = scale_sum
        ahead = (mine, mine)
        if OF_WEIGHT:
            ahead = fetch_vectors(start, vectors, BLOCK_N)
            keep.index(4 * strip).store(ahead[0])
            keep.index(4 * strip + 1).store(ahead[1])
            ahead = fetch_vectors(gl.minimum(start + 1, blocks - 1), vectors, BLOCK_N)
        else:
            mine = gl.load(vectors[0] + (row + gl.arange(0, STRIP, rows)))
        mbarrier.wait(owned_full.index(strip), turn % 2)
        streamed = buffers[1].index(cursor[0]).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        mbarrier.wait(full.index(cursor[0]), cursor[1])
        score = warpgroup_mma(owned_rows, streamed, nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        wide = score_grads(
            score, strip, tile, start, mine, keep, 4 * strip, vectors, work, power, SIZES, KIND, True
        )
        if WITH_SCALE:
            scale_sum += gl.sum(wide * score, 1)
        slope = gl.convert_layout(wide.to(owned_rows.dtype), operand)
        special = is_special(owned_marks, start + 1, work, BLOCK_N, KIND)
        for block in range(start + 1, end):
            following = next_stage(cursor, STAGES)
            place = 4 * strip + 2 * ((block - start) % 2)
            further = is_special(owned_marks, block + 1, work, BLOCK_N, KIND)
            mbarrier.wait(full.index(following[0]), following[1])
            if special != 0:
                total, slope, scale_sum, ahead = advance(
                    total, slope, scale_sum, ahead, owned_rows, following, cursor, strip, tile, block, mine,
                    keep, place, buffers, barriers, vectors, work, power, nothing,
                    SIZES, KIND, True,
                )  # fmt: skip
            else:
                total, slope, scale_sum, ahead = advance(
                    total, slope, scale_sum, ahead, owned_rows, following, cursor, strip, tile, block, mine,
                    keep, place, buffers, barriers, vectors, work, power, nothing,
                    SIZES, KIND, False,
                )  # fmt: skip
            special = further
            cursor = following
        mbarrier.arrive(owned_free.index(strip))
        value = buffers[1].index(cursor[0]).reshape([BLOCK_N, BLOCK_D])
        total = warpgroup_mma(slope, value, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index(cursor[0]))
        cursor = next_stage(cursor, STAGES)
        out = total * scale
        i = row + gl.arange(0, STRIP, gl.SliceLayout(1, sums))
        if not OF_WEIGHT:
            out = out * gl.expand_dims(gl.load(vectors[1] + i), 1)
            if WITH_SCALE:
                owned = row + gl.arange(0, STRIP, rows)
                share = scale_sum * gl.load(vectors[1] + owned)
                gl.store(grad_scale + (part.to(gl.int64) * work[0] + owned), share, mask=owned < work[0])
        column = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, sums)), 0)
        inside = (gl.expand_dims(i, 1) < work[0]) & (column < width)
        place = gl.expand_dims(part.to(gl.int64) * work[0] + i, 1) * width + column
        gl.store(grad + place, out.to(grad.dtype.element_ty), mask=inside)
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit(do_not_specialize=["num_owned", "num_streamed", "num_tiles", "num_units", "per_part", "width"])
def gradient_kernel(
    owned_desc, streamed_desc, scale, top, sign, of_target, rows, marks, grad, grad_scale,
    num_owned, num_streamed, num_tiles, num_units, per_part, width,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    OF_WEIGHT: gl.constexpr, HAS_TARGET: gl.constexpr, WITH_SCALE: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes grad [parts, num_owned, width] of hidden, or of the weight if OF_WEIGHT, and each row's share of
    the scale's gradient to grad_scale [parts, num_owned].

    scale: [1] float32; top, sign, of_target, rows and marks are as `upstream_kernel` writes them. A program
        that owns rows of hidden applies their sign at the end.
    """
    SIZES: gl.constexpr = (BLOCK_D, BLOCK_N, STAGES, STRIPS)
    KIND: gl.constexpr = (OF_WEIGHT, HAS_TARGET, WITH_SCALE)
    buffers, barriers = prepared(owned_desc, streamed_desc, SIZES, 1)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keep = gl.allocate_shared_memory(gl.float32, [4 * STRIPS, BLOCK_N], line)
    work = (num_owned, num_streamed, num_tiles, num_units, per_part)
    vectors = (top, sign, of_target, rows)
    factor = gl.load(scale)
    power = factor * LOG2E
    loading = (owned_desc, streamed_desc, buffers, barriers, work, SIZES)
    gl.static_assert(STRIPS == 2)
    gl.warp_specialize([
        (adding_group, (
            strip, grad, grad_scale, marks, buffers, barriers, keep, vectors, work, width, power, factor,
            SIZES, KIND,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
