"""`coarse_kernel` for Hopper, scheduled by hand (Gluon): one warp loads, up to four warp groups compute.

A program works through units: some queries and a part of the groups. A unit's queries are cut into strips of
64, one a warp group, which keeps them in registers as the left operand of all its products. The loading warp
runs ahead through the groups of items, into `STAGES` buffers; barriers in shared memory say what is full and
what is free. While one warp group looks for the largest scores of a group of items, the tensor cores work for
the others.
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

from recsys.ops.runtime.gluon_pieces import next_stage

STRIP = gl.constexpr(64)
"""Queries of a warp group: the rows of one matrix instruction."""


@gluon.jit
def groups_of(unit, num_tiles, num_groups, groups_per_part):
    """First group of a unit, and the one behind its last."""
    first = unit // num_tiles * groups_per_part
    return first, gl.minimum(first + groups_per_part, num_groups)


@gluon.jit
def loading_warp(
    item_rows, buffer, full, free, num_units, num_tiles, num_groups, groups_per_part, SIZES: gl.constexpr
):
    """Loads the groups of one unit after the other."""
    GROUP: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    cursor = (gl.to_tensor(0), gl.to_tensor(1))  # a wait for the parity before the first returns at once
    unit = gl.program_id(0)
    while unit < num_units:
        first, end = groups_of(unit, num_tiles, num_groups, groups_per_part)
        for group in range(first, end):
            stage, parity = cursor
            mbarrier.wait(free.index(stage), parity)
            mbarrier.expect(full.index(stage), item_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(
                item_rows, [group * GROUP, 0], full.index(stage), buffer.index(stage)
            )
            cursor = next_stage(cursor, STAGES)
        unit += gl.num_programs(0)


@gluon.jit
def load_strip(query_rows, first, num_queries, stride, scores: gl.constexpr, D: gl.constexpr):
    """[STRIP, D] from query `first` on, as the left operand of products with the layout `scores`."""
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    row = gl.expand_dims(first + gl.arange(0, STRIP, gl.SliceLayout(1, operand)), 1)
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, operand)), 0)
    mask = (row < num_queries) & (column < stride)
    return gl.load(query_rows + (row.to(gl.int64) * stride + column), mask=mask, other=0.0)


@gluon.jit
def best_of(score):
    """Bits of the largest score of each row, the last of them 0: see `triton_kernels`."""
    return gl.max(score, 1).to(gl.int32, bitcast=True) & -2


@gluon.jit
def computing_group(
    strip: gl.constexpr, query_rows, maxima, buffer, full, free, num_units, num_tiles, num_queries,
    num_groups, groups_per_part, stride_queries, stride_maxima, SIZES: gl.constexpr,
):  # fmt: skip
    """One strip, or two, of the queries of one unit after the other."""
    D: gl.constexpr = SIZES[0]
    GROUP: gl.constexpr = SIZES[1]
    STAGES: gl.constexpr = SIZES[2]
    STRIPS: gl.constexpr = SIZES[3]
    HALVES: gl.constexpr = SIZES[4]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    nothing = gl.zeros([STRIP, GROUP], gl.float32, scores)
    cursor = (gl.to_tensor(0), gl.to_tensor(0))
    unit = gl.program_id(0)
    while unit < num_units:
        first_query = (unit % num_tiles * STRIPS + strip) * (HALVES * STRIP)
        q = load_strip(query_rows, first_query, num_queries, stride_queries, scores, D)
        query = first_query + gl.arange(0, STRIP, gl.SliceLayout(1, scores))
        out = query.to(gl.int64) * stride_maxima
        if HALVES == 2:
            other_q = load_strip(query_rows, first_query + STRIP, num_queries, stride_queries, scores, D)
        first, end = groups_of(unit, num_tiles, num_groups, groups_per_part)
        for group in range(first, end):
            stage, parity = cursor
            rows = buffer.index(stage).permute((1, 0))
            mbarrier.wait(full.index(stage), parity)
            score = warpgroup_mma(q, rows, nothing, use_acc=False, is_async=True)
            if HALVES == 2:
                other = warpgroup_mma(other_q, rows, nothing, use_acc=False, is_async=True)
                score = warpgroup_mma_wait(1, deps=(score,))
                gl.store(maxima + (out + group), best_of(score), mask=query < num_queries)
                other = warpgroup_mma_wait(0, deps=(other,))
                mbarrier.arrive(free.index(stage))
                other_out = out + STRIP * stride_maxima.to(gl.int64)
                gl.store(maxima + (other_out + group), best_of(other), mask=query + STRIP < num_queries)
            else:
                score = warpgroup_mma_wait(0, deps=(score,))
                mbarrier.arrive(free.index(stage))
                gl.store(maxima + (out + group), best_of(score), mask=query < num_queries)
            cursor = next_stage(cursor, STAGES)
        unit += gl.num_programs(0)


@gluon.jit(do_not_specialize=["num_units", "num_tiles", "num_queries", "num_groups", "groups_per_part"])
def coarse_kernel(
    item_rows, query_rows, maxima, num_units, num_tiles, num_queries, num_groups, groups_per_part,
    stride_queries, stride_maxima,
    D: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr, HALVES: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """maxima [queries, stride_maxima] int32, the largest rounded score of each group. Rows behind the last
    item count as items of zeros. One program a processor; units with the same groups follow one another.

    query_rows [queries, stride_queries], zero behind their own columns.
    """
    SIZES: gl.constexpr = (D, GROUP, STAGES, STRIPS, HALVES)
    buffer = gl.allocate_shared_memory(item_rows.dtype, [STAGES] + item_rows.block_shape, item_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=STRIPS)
    fence_async_shared()
    loading = (item_rows, buffer, full, free, num_units, num_tiles, num_groups, groups_per_part, SIZES)
    gl.static_assert(STRIPS == 2 or STRIPS == 3 or STRIPS == 4)
    # A tuple that had a name, or were added to one, would lose what its members know at compile time.
    gl.warp_specialize([
        (computing_group, (
            strip, query_rows, maxima, buffer, full, free, num_units, num_tiles, num_queries, num_groups,
            groups_per_part, stride_queries, stride_maxima, SIZES,
        )) if strip < STRIPS else (loading_warp, loading)
        for strip in (0, 1, 2, 3, 4)[:STRIPS + 1]
    ], [4] * (STRIPS - 1) + [1], [COMPUTING_REGISTERS] * (STRIPS - 1) + [LOADING_REGISTERS])  # fmt: skip
