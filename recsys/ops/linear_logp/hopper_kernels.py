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
    SIZES     BLOCK_D, BLOCK_N, STAGES, STRIPS, PIECES

A row has `PIECES` pieces of `BLOCK_D` columns, each with a buffer of its own. Rows of up to 256 columns are
one piece. Of wider rows of hidden a tile stays in shared memory whole, and those of the weight pass through
it piece by piece.
    KIND      OF_WEIGHT, HAS_TARGET, WITH_SCALE

No product is in flight at the end of a loop body: ptxas (13.5) would otherwise put a wait behind every
product.

Registers do not suffice for the gradient of a tile of wide rows. There `score_grads_kernel` writes the
gradients of the scores to memory, one section of the candidates at a time, and library products do the rest;
hidden is `owned`.
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

from recsys.ops.runtime.gluon_pieces import RAGGED_ROWS, STRIP, init_rings, new_buffers, new_ring, next_stage

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
def load_piece(descriptor, first, piece, count, full, buffer):
    """Starts to load one piece of the rows from `first` on, out of `count` rows, into `buffer`; its barrier
    `full` already expects it."""
    WIDTH: gl.constexpr = descriptor.block_shape[3]
    rows = RAGGED_ROWS - count + first
    tma.async_copy_global_to_shared(descriptor, [RAGGED_ROWS, count, rows, piece * WIDTH], full, buffer)


@gluon.jit
def loading_warp(owned_desc, streamed_desc, buffers, barriers, work, SIZES: gl.constexpr):
    """Loads the operands of this program's units in order."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    PIECES: gl.constexpr = SIZES[4]
    owned_full, owned_free, full, free = barriers
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, _, start, end = extent(unit, work, BLOCK_N)
        for strip in gl.static_range(STRIPS):
            mbarrier.wait(owned_free.index(strip), turn % 2 ^ 1)
            row = (tile * STRIPS + strip) * STRIP
            mbarrier.expect(owned_full.index(strip), PIECES * owned_desc.block_type.nbytes)
            for piece in gl.static_range(PIECES):
                owned = buffers[0].index(strip * PIECES + piece)
                load_piece(owned_desc, row, piece, work[0], owned_full.index(strip), owned)
        for block in range(start, end):
            for piece in gl.static_range(PIECES):
                stage, parity = cursor
                mbarrier.wait(free.index(stage), parity)
                row = block * BLOCK_N
                mbarrier.expect(full.index(stage), streamed_desc.block_type.nbytes)
                streamed = buffers[1].index(stage)
                load_piece(streamed_desc, row, piece, work[1], full.index(stage), streamed)
                cursor = next_stage(cursor, STAGES)
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit
def scores_of(strip: gl.constexpr, cursor, buffers, barriers, nothing, SIZES: gl.constexpr):
    """Computes the scores of one block; returns them and the cursor of the block's last piece."""
    BLOCK_D: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    PIECES: gl.constexpr = SIZES[4]
    full, free = barriers[2], barriers[3]
    score = nothing
    for piece in gl.static_range(PIECES):
        before = cursor[0]
        if piece > 0:
            cursor = next_stage(cursor, STAGES)
        stage, parity = cursor
        owned = buffers[0].index(strip * PIECES + piece).reshape([STRIP, BLOCK_D])
        streamed = buffers[1].index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        mbarrier.wait(full.index(stage), parity)
        score = warpgroup_mma(owned, streamed, score, use_acc=piece > 0, is_async=True)
        if piece > 0:
            score = warpgroup_mma_wait(1, deps=(score,))
            mbarrier.arrive(free.index(before))
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(free.index(cursor[0]))
    return score, cursor


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
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, part, start, end = extent(unit, work, BLOCK_N)
        mbarrier.wait(barriers[0].index(strip), turn % 2)
        best = gl.full([STRIP], float("-inf"), gl.float32, rows)
        sums = gl.zeros([STRIP], gl.float32, rows)
        for block in range(start, end):
            score, cursor = scores_of(strip, cursor, buffers, barriers, nothing, SIZES)
            best, sums = add_scores(best, sums, score, block, work, power)
            cursor = next_stage(cursor, STAGES)
        mbarrier.arrive(barriers[1].index(strip))
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
    PIECES: gl.constexpr, COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes maximum and total [parts, num_owned] float32 of the scaled scores for each part of the
    candidates.

    scale: [1] float32. A unit is a tile of hidden and a part of the weight; tiles vary fastest, so that
        concurrent programs share candidates.
    """
    SIZES: gl.constexpr = (BLOCK_D, BLOCK_N, STAGES, STRIPS, PIECES)
    buffers, barriers = prepared(owned_desc, streamed_desc, SIZES)
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
def prepared(owned_desc, streamed_desc, SIZES: gl.constexpr):
    """Allocates buffers for the operands, and initializes their barriers."""
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    buffers = (new_buffers(owned_desc, STRIPS * SIZES[4]), new_buffers(streamed_desc, STAGES))
    owned_full, owned_free = new_ring(STRIPS)
    full, free = new_ring(STAGES)
    init_rings(((owned_full, owned_free),), STRIPS, 1)
    init_rings(((full, free),), STAGES, STRIPS)
    fence_async_shared()
    return buffers, (owned_full, owned_free, full, free)


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
    SIZES: gl.constexpr = (BLOCK_D, BLOCK_N, STAGES, STRIPS, 1)
    KIND: gl.constexpr = (OF_WEIGHT, HAS_TARGET, WITH_SCALE)
    buffers, barriers = prepared(owned_desc, streamed_desc, SIZES)
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


@gluon.jit
def writing_group(
    strip: gl.constexpr, out_desc, grad_scale, marks, buffers, barriers, vectors, work, section, power, scale,
    SIZES: gl.constexpr, HAS_TARGET: gl.constexpr, WITH_SCALE: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of the scores of one strip, for each unit."""
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    first_block, all_blocks = section
    out_buffer = buffers[2].index(strip)
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    nothing = gl.zeros([STRIP, BLOCK_N], gl.float32, scores)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, part, start, end = extent(unit, work, BLOCK_N)
        row = (tile * STRIPS + strip) * STRIP
        owned = row + gl.arange(0, STRIP, rows)
        top = gl.expand_dims(gl.load(vectors[0] + owned), 1)
        sign = gl.load(vectors[1] + owned)
        factor = gl.expand_dims(sign * scale, 1)
        scale_sum = gl.zeros([STRIP], gl.float32, rows)
        owned_marks = marks + tile.to(gl.int64) * all_blocks + first_block
        mbarrier.wait(barriers[0].index(strip), turn % 2)
        for block in range(start, end):
            score, cursor = scores_of(strip, cursor, buffers, barriers, nothing, SIZES)
            cursor = next_stage(cursor, STAGES)
            slope = exp2(score * power - top)
            if HAS_TARGET:
                if gl.load(owned_marks + block).to(gl.int32) != 0:
                    j = (first_block + block) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
                    of_target = gl.expand_dims(gl.load(vectors[2] + owned) * sign, 1)
                    target = gl.expand_dims(gl.load(vectors[3] + owned), 1)
                    slope = gl.where(gl.expand_dims(j, 0) == target, of_target, slope)
            if WITH_SCALE:
                j = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
                inside = gl.where(gl.expand_dims(j, 0) < work[1], slope, 0.0)
                scale_sum += gl.sum(inside * score, 1)
            tma.store_wait(0)  # the previous block has left the buffer
            out_buffer.reshape([STRIP, BLOCK_N]).store((slope * factor).to(out_buffer.dtype))
            fence_async_shared()
            place = RAGGED_ROWS - work[0] + row
            tma.async_copy_shared_to_global(
                out_desc, [RAGGED_ROWS, work[0], place, block * BLOCK_N], out_buffer
            )
        mbarrier.arrive(barriers[1].index(strip))
        if WITH_SCALE:
            target_place = part.to(gl.int64) * work[0] + owned
            gl.store(grad_scale + target_place, scale_sum * sign, mask=owned < work[0])
        turn += 1
        unit += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_owned", "num_streamed", "num_tiles", "num_units", "per_part", "first_block", "all_blocks"
    ]
)  # fmt: skip
def score_grads_kernel(
    owned_desc, streamed_desc, out_desc, scale, top, sign, of_target, rows, marks, grad_scale,
    num_owned, num_streamed, num_tiles, num_units, per_part, first_block, all_blocks,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    PIECES: gl.constexpr, HAS_TARGET: gl.constexpr, WITH_SCALE: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dz times the scale, [num_owned, num_streamed], for the section of candidates that begins at
    block `first_block` of `all_blocks`, and each row's share of the scale's gradient to grad_scale [parts,
    num_owned]. The other parameters are as in `gradient_kernel`."""
    SIZES: gl.constexpr = (BLOCK_D, BLOCK_N, STAGES, STRIPS, PIECES)
    operands, barriers = prepared(owned_desc, streamed_desc, SIZES)
    buffers = (operands[0], operands[1], new_buffers(out_desc, STRIPS))
    work = (num_owned, num_streamed, num_tiles, num_units, per_part)
    section = (first_block, all_blocks)
    vectors = (top, sign, of_target, rows)
    factor = gl.load(scale)
    power = factor * LOG2E
    loading = (owned_desc, streamed_desc, buffers, barriers, work, SIZES)
    gl.static_assert(STRIPS == 2)
    gl.warp_specialize([
        (writing_group, (
            strip, out_desc, grad_scale, marks, buffers, barriers, vectors, work, section, power, factor,
            SIZES, HAS_TARGET, WITH_SCALE,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2)
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip
