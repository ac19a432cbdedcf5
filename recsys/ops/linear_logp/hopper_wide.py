"""Hopper kernels of `linear_logp` for wide rows.

A tile of hidden stays in shared memory, and the weight passes through shared memory in pieces of 64 columns.
Registers do not suffice for the gradient of a tile of wide rows, so the gradients of the scores are written
to memory, one section of the candidates at a time, and library products do the rest. The schedule and the
names are those of `hopper_kernels`; here hidden is `owned`, and

    SIZES     CHUNKS of 64 columns, BLOCK_N, STAGES, STRIPS
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

from recsys.ops.linear_logp.hopper_kernels import (
    LOG2E,
    RAGGED_ROWS,
    STRIP,
    add_scores,
    exp2,
    extent,
    next_stage,
    prepared,
)

CHUNK = gl.constexpr(64)
"""Columns per piece: 128 bytes, one line of shared memory as the tensor cores read it."""


@gluon.jit
def copy_rows(descriptor, first, column, count, full, buffer):
    """Starts to load columns of the rows from `first` on, out of `count` rows, into `buffer`; `full` already
    expects them."""
    rows = RAGGED_ROWS - count + first
    tma.async_copy_global_to_shared(descriptor, [RAGGED_ROWS, count, rows, column], full, buffer)


@gluon.jit
def loading_warp(owned_desc, streamed_desc, buffers, barriers, work, SIZES: gl.constexpr):
    """Loads the operands of this program's units in order."""
    CHUNKS: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    owned_full, owned_free, full, free = barriers
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # waiting for the parity before the first returns at once
    turn = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < work[3]:
        tile, _, start, end = extent(unit, work, BLOCK_N)
        for strip in gl.static_range(STRIPS):
            mbarrier.wait(owned_free.index(strip), turn % 2 ^ 1)
            mbarrier.expect(owned_full.index(strip), CHUNKS * owned_desc.block_type.nbytes)
            row = (tile * STRIPS + strip) * STRIP
            for chunk in gl.static_range(CHUNKS):
                copy_rows(
                    owned_desc, row, chunk * CHUNK, work[0], owned_full.index(strip),
                    buffers[0].index(strip * CHUNKS + chunk),
                )  # fmt: skip
        for block in range(start, end):
            for chunk in gl.static_range(CHUNKS):
                stage, parity = cursor
                mbarrier.wait(free.index(stage), parity)
                mbarrier.expect(full.index(stage), streamed_desc.block_type.nbytes)
                copy_rows(
                    streamed_desc, block * BLOCK_N, chunk * CHUNK, work[1], full.index(stage),
                    buffers[1].index(stage),
                )  # fmt: skip
                cursor = next_stage(cursor, STAGES)
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit
def scores_of(strip: gl.constexpr, cursor, buffers, barriers, nothing, SIZES: gl.constexpr):
    """Computes the scores of one block; returns them and the cursor behind the block."""
    CHUNKS: gl.constexpr = SIZES[0]
    BLOCK_N: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    full, free = barriers[2], barriers[3]
    score = nothing
    before = cursor[0]
    for chunk in gl.static_range(CHUNKS):
        stage, parity = cursor
        owned = buffers[0].index(strip * CHUNKS + chunk).reshape([STRIP, CHUNK])
        streamed = buffers[1].index(stage).reshape([BLOCK_N, CHUNK]).permute((1, 0))
        mbarrier.wait(full.index(stage), parity)
        score = warpgroup_mma(owned, streamed, score, use_acc=chunk > 0, is_async=True)
        if chunk > 0:
            score = warpgroup_mma_wait(1, deps=(score,))
            mbarrier.arrive(free.index(before))
        before = stage
        cursor = next_stage(cursor, STAGES)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(free.index(before))
    return score, cursor


@gluon.jit
def summing_group(
    strip: gl.constexpr, maximum, total, buffers, barriers, work, power, scale, SIZES: gl.constexpr
):
    """Computes the maximum and sum of the scaled scores of one strip, for each unit."""
    BLOCK_N: gl.constexpr = SIZES[1]
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
        mbarrier.arrive(barriers[1].index(strip))
        i = (tile * STRIPS + strip) * STRIP + gl.arange(0, STRIP, rows)
        out = part.to(gl.int64) * work[0] + i
        gl.store(maximum + out, best * scale, mask=i < work[0])
        gl.store(total + out, sums, mask=i < work[0])
        turn += 1
        unit += gl.num_programs(0)


@gluon.jit
def writing_group(
    strip: gl.constexpr, out_desc, grad_scale, marks, buffers, barriers, vectors, work, section, power, scale,
    SIZES: gl.constexpr, HAS_TARGET: gl.constexpr, WITH_SCALE: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of the scores of one strip, for each unit."""
    BLOCK_N: gl.constexpr = SIZES[1]
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


@gluon.jit(do_not_specialize=["num_owned", "num_streamed", "num_tiles", "num_units", "per_part"])
def row_sums_kernel(
    owned_desc, streamed_desc, scale, maximum, total, num_owned, num_streamed, num_tiles, num_units, per_part,
    CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Does what `hopper_kernels.forward_kernel` does, for wide rows."""
    SIZES: gl.constexpr = (CHUNKS, BLOCK_N, STAGES, STRIPS)
    buffers, barriers = prepared(owned_desc, streamed_desc, SIZES, CHUNKS)
    work = (num_owned, num_streamed, num_tiles, num_units, per_part)
    factor = gl.load(scale)
    power = factor * LOG2E
    gl.static_assert(STRIPS == 2)
    # The tuple must be a literal: with a name it would lose the compile-time values of its members.
    gl.warp_specialize([
        (summing_group, (0, maximum, total, buffers, barriers, work, power, factor, SIZES)),
        (summing_group, (1, maximum, total, buffers, barriers, work, power, factor, SIZES)),
        (loading_warp, (owned_desc, streamed_desc, buffers, barriers, work, SIZES)),
    ], [4, 1], [COMPUTING_REGISTERS, LOADING_REGISTERS])  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "num_owned", "num_streamed", "num_tiles", "num_units", "per_part", "first_block", "all_blocks"
    ]
)  # fmt: skip
def score_grads_kernel(
    owned_desc, streamed_desc, out_desc, scale, top, sign, of_target, rows, marks, grad_scale,
    num_owned, num_streamed, num_tiles, num_units, per_part, first_block, all_blocks,
    CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    HAS_TARGET: gl.constexpr, WITH_SCALE: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dz times the scale, [num_owned, num_streamed], for the section of candidates that begins at
    block `first_block` of `all_blocks`, and each row's share of the scale's gradient to grad_scale [parts,
    num_owned]. The other parameters are as in `gradient_kernel`."""
    SIZES: gl.constexpr = (CHUNKS, BLOCK_N, STAGES, STRIPS)
    operands, barriers = prepared(owned_desc, streamed_desc, SIZES, CHUNKS)
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, [STRIPS] + out_desc.block_shape, out_desc.layout)
    buffers = (operands[0], operands[1], out_buffer)
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
