"""A projection on Hopper with SiLU in its end, in one kernel scheduled by hand (Gluon).

    out = x @ weight^T + bias,    active = silu(out),    [T, K] x [N, K]

A program takes one tile of 128 x 256 entries after the other, those of the same rows first, so that rows of x
come from memory once. One warp loads 64 columns of x and of the weight at a time, through tensor maps, into
`STAGES` buffers; each of two warp groups multiplies 64 rows. Its strip leaves through a buffer of its own,
before and behind SiLU. Descriptors are ragged (`sm90_start`).
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

from recsys.ops.runtime.gluon_pieces import RAGGED_ROWS, STRIP, next_stage

STRIPS = gl.constexpr(2)
"""Of a tile."""


@gluon.jit
def place_of(row, num_rows, column):
    """Coordinates of a box; rows from `num_rows` on are out of bounds."""
    return [RAGGED_ROWS, num_rows, RAGGED_ROWS - num_rows + row, column]


@gluon.jit
def loading_warp(x_desc, weight_desc, buffers, barriers, work, STAGES: gl.constexpr):
    """Loads what the tiles of this program need, in their order."""
    ROWS: gl.constexpr = x_desc.block_shape[2]
    COLUMNS: gl.constexpr = weight_desc.block_shape[2]
    DEPTH: gl.constexpr = x_desc.block_shape[3]
    num_rows, num_columns, num_tiles, across, steps = work
    full, free = barriers[0], barriers[1]
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # a wait for the parity before the first returns at once
    tile = gl.program_id(0)
    while tile < num_tiles:
        row, column = tile // across * ROWS, tile % across * COLUMNS
        for step in range(steps):
            stage, parity = cursor
            mbarrier.wait(free.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
            place = place_of(row, num_rows, step * DEPTH)
            tma.async_copy_global_to_shared(x_desc, place, ready, buffers[0].index(stage))
            place = place_of(column, num_columns, step * DEPTH)
            tma.async_copy_global_to_shared(weight_desc, place, ready, buffers[1].index(stage))
            cursor = next_stage(cursor, STAGES)
        tile += gl.num_programs(0)


@gluon.jit
def silu(x):
    """By one special instruction: x sigmoid(x) = x / 2 (1 + tanh(x / 2))."""
    half = 0.5 * x
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1
    )
    return half * tanh + half


@gluon.jit
def strip_of(tile, strip: gl.constexpr, work, COLUMNS: gl.constexpr):
    """Coordinates of a strip."""
    row = (tile // work[3] * STRIPS + strip) * STRIP
    return place_of(row, work[0], tile % work[3] * COLUMNS)


@gluon.jit
def send(value, descriptor, place, buffer):
    """A strip, through a buffer that nothing is in any more."""
    buffer.reshape([value.shape[0], value.shape[1]]).store(value.to(descriptor.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, place, buffer)


@gluon.jit
def computing_group(
    strip: gl.constexpr, out_desc, active_desc, bias, buffers, barriers, work,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One strip of each tile."""
    COLUMNS: gl.constexpr = out_desc.block_shape[3]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    num_rows, num_columns, num_tiles, across, steps = work
    full, free = barriers
    buffer = buffers[2].index(strip)
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    tile = gl.program_id(0)
    while tile < num_tiles:
        total = gl.zeros([STRIP, COLUMNS], gl.float32, sums)
        for _ in range(steps):
            stage, parity = cursor
            x = buffers[0].index(stage).reshape([STRIPS * STRIP, DEPTH]).slice(strip * STRIP, STRIP, 0)
            weight = buffers[1].index(stage).reshape([COLUMNS, DEPTH]).permute((1, 0))
            mbarrier.wait(full.index(stage), parity)
            total = warpgroup_mma(x, weight, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(free.index(stage))
            cursor = next_stage(cursor, STAGES)
        own = tile % across * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, sums))
        shift = gl.load(bias + own, mask=own < num_columns, other=0.0)
        total += gl.expand_dims(shift.to(gl.float32), 0)
        tma.store_wait(0)  # the strip before has left the buffer
        send(total, out_desc, strip_of(tile, strip, work, COLUMNS), buffer)
        total = silu(total)
        tma.store_wait(0)
        send(total, active_desc, strip_of(tile, strip, work, COLUMNS), buffer)
        tile += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_tiles", "across", "steps"])
def projection_kernel(
    x_desc, weight_desc, out_desc, active_desc, bias, num_rows, num_columns, num_tiles, across, steps,
    STAGES: gl.constexpr,
):  # fmt: skip
    """out and active [T, N]. `across`: tiles of the same rows; `steps`: of a sum."""
    DEPTH: gl.constexpr = x_desc.block_shape[3]
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    weight_buffer = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout
    )
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, [STRIPS] + out_desc.block_shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=STRIPS)
    fence_async_shared()
    buffers, barriers = (x_buffer, weight_buffer, out_buffer), (full, free)
    work = (num_rows, num_columns, num_tiles, across, steps)
    gl.warp_specialize([
        (computing_group, (0, out_desc, active_desc, bias, buffers, barriers, work, DEPTH, STAGES)),
        (computing_group, (1, out_desc, active_desc, bias, buffers, barriers, work, DEPTH, STAGES)),
        (loading_warp, (x_desc, weight_desc, buffers, barriers, work, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
