"""The Hopper kernel for the gradients of `linear_logp` with wide rows.

Registers do not suffice for the gradient of a tile of wide rows, so the gradients of the scores are written
to memory, one section of the candidates at a time, and library products do the rest. Schedule and names are
those of `hopper_kernels`; hidden is `owned`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from recsys.ops.linear_logp.hopper_kernels import LOG2E, exp2, extent, loading_warp, prepared, scores_of
from recsys.ops.runtime.gluon_pieces import RAGGED_ROWS, STRIP, new_buffers, next_stage


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
