"""Computes all gradients of attention with a bias in one hand-scheduled (Gluon) Hopper kernel, for heads of
64.

The bias and the sums of its tables are the inline assembly of `bias.ptx`; formulas are those of
`triton_kernels`. A program owns a tile of keys and goes through the blocks of rows that see them, so that
the bias is computed only once and the gradient of each score is in one place. Two programs share a
multiprocessor and hide one another's waits.

dS goes to shared memory, where it is multiplied with the keys. The product, this tile's contribution to dQ,
takes its place, and the copy engine adds it to float32 sums in memory, in any order. With adds from registers
(`red`) the kernel took a third longer.

    loading   descriptors of q and dO, and the head's first columns in them
    buffers   q and dO, two blocks each; k, v
    full      barriers of both blocks of q and dO, and of k and v
    times     the operands of `packed_scores` for keys and for rows
"""

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

from recsys.ops.hstu_attention.bias import packed
from recsys.ops.hstu_attention.bias.packed import (
    bias_constants,
    finished,
    launch_with_declared_memory,
    tables_constants,
    zero_sums,
)
from recsys.ops.hstu_attention.block_sizes import Blocks
from recsys.ops.hstu_attention.hopper.backward import UNSEEN, load_runs, load_tile, round_to
from recsys.ops.hstu_attention.hopper.forward import WARPS, section_of, visible
from recsys.ops.hstu_attention.mask_forms import rules
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.triton import bias_arguments_of, operands, scalars, strides
from recsys.ops.hstu_attention.triton_kernels import VARYING
from recsys.ops.hstu_attention.work_list import kernels as work_item
from recsys.ops.hstu_attention.work_list import key_work
from recsys.ops.hstu_attention.work_list.kernels import NUM_COLUMNS
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.descriptors import gluon_descriptor
from recsys.ops.runtime.gluon_pieces import (
    RAGGED_ROWS,
    STRIP,
    async_add_to_global,
    init_barriers,
    new_barriers,
    new_buffers,
    tanh,
)
from recsys.ops.runtime.launch import unwrapped

BLOCKS = Blocks(rows=STRIP.value, keys=STRIP.value, num_warps=WARPS, num_stages=2)


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Gradients, problem: Problem, bias: RelativeBias
) -> Gradients:
    """Fills in `out` and adds the gradients of the tables; the tensors must satisfy `can_describe`.

    Needs 256 bytes of temporary memory per token and head.
    """
    num_tokens, num_heads, dim = q.shape
    section = section_of(8 * num_heads * dim, problem.mask)  # q and dO in 16 bits, and float32 sums
    if section is not None and section >= num_tokens:
        section = None  # a single section needs no list of its own
    items = key_work(problem.mask, problem.layout, BLOCKS.keys, BLOCKS.rows, section)
    sums = zero_sums(q, problem.layout.max_len, bias)
    rows = q.new_zeros(num_tokens, num_heads, dim, dtype=torch.float32)
    compiled_for = {
        **rules(problem.mask),
        **bias_constants(True, rows_first=False, sums=True),
        **tables_constants(sums),
        "num_warps": WARPS,
    }
    arguments = [
        *operands(True, *((tensor, STRIP.value) for tensor in (q, k, v, grad_out, rows))),
        *(out.k, out.v, items, num_heads, *strides(q, k, v, grad_out)[1::2], *scalars(problem)),
        *bias_arguments_of(problem, items, BLOCKS, unwrapped, True, rows_first=False, section=section),
        *(*sums, sums.by_bucket.shape[0]),
    ]
    programs = items.shape[0] * num_heads
    launch_with_declared_memory(biased_kernel, programs, arguments, compiled_for, gluon_descriptor)
    round_to(out.q, rows, 0.5 * problem.alpha / problem.scale_len)
    position_table, time_table = finished(sums, problem.scale_len, bias)
    return out._replace(position_table=position_table, time_table=time_table)


THREADS = gl.constexpr(packed.THREADS.value)

num_blocks = gluon.jit(work_item.num_blocks.fn)
block_at = gluon.jit(work_item.block_at.fn)
records_of = gluon.jit(packed.records_of.fn)
packed_scores = gluon.jit(packed.packed_scores.fn)
add_to_tables = gluon.jit(packed.add_to_tables.fn)


@gluon.jit
def load_pair(descriptors, tile, first, columns, full, buffers):
    """Starts copies of the sample's rows from `first` on, from two tensors; `full` expects both copies."""
    start, length = tile[0], tile[1]
    end, rows = start.to(gl.int32) + length, RAGGED_ROWS - length + first
    mbarrier.expect(full, descriptors[0].block_type.nbytes + descriptors[1].block_type.nbytes)
    place = [RAGGED_ROWS, end, rows, columns[0]]
    tma.async_copy_global_to_shared(descriptors[0], place, full, buffers[0])
    place = [RAGGED_ROWS, end, rows, columns[1]]
    tma.async_copy_global_to_shared(descriptors[1], place, full, buffers[1])


@gluon.jit
def load_block(number, tile, runs, descriptors, columns, buffers, full):
    """Loads block number `number` of the blocks of q and dO that see the tile."""
    block, _ = block_at(number, runs)
    stage = number % 2
    pair = (buffers[0].index(stage), buffers[1].index(stage))
    load_pair(descriptors, tile, block * STRIP, columns, full.index(stage), pair)


@gluon.jit
def silu_and_slope(score, first_row, first, history_end, masked, rule, RULE: gl.constexpr):
    """Returns SiLU of halved scores [keys, rows], and twice its slope; both are zero for hidden pairs."""
    if masked:
        i = first_row + gl.arange(0, STRIP, gl.SliceLayout(0, score.type.layout))
        j = first + gl.arange(0, STRIP, gl.SliceLayout(1, score.type.layout))
        seen = visible(gl.expand_dims(i, 0), gl.expand_dims(j, 1), history_end, rule, RULE)
        score = gl.where(seen, score, UNSEEN)
    doubled = tanh(score) + 1.0
    weight = score * doubled
    return weight, doubled + weight * (2.0 - doubled)


@gluon.jit
def add_block(
    sums, number, count, tile, runs, rule, half_alpha, loading, buffers, full, rows_desc, rows_buffer,
    row_column, times, tables, RULE: gl.constexpr, TEXTS: gl.constexpr,
):  # fmt: skip
    """Adds the contribution of block number `number` of rows to `sums`, dK and dV of the tile. On return only
    the copies of the next block and of this block's dQ, to column `row_column`, are in flight."""
    grad_k, grad_v = sums
    start, length, history_end, first = tile
    key_times, row_times = times
    layout: gl.constexpr = grad_k.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = buffers[0].dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    nothing = gl.zeros([STRIP, STRIP], gl.float32, layout)
    stage = number % 2
    block, masked = block_at(number, runs)
    first_row = block * STRIP
    q = buffers[0].index(stage).reshape([STRIP, STRIP])
    grad_out = buffers[1].index(stage).reshape([STRIP, STRIP])
    k = buffers[2].reshape([STRIP, STRIP])
    v = buffers[3].reshape([STRIP, STRIP])
    ds = rows_buffer._reinterpret(dtype, [STRIP, STRIP], flat)
    tma.store_wait(0)  # dQ of the previous block has left the buffer
    gl.thread_barrier()  # and no thread reads the other block of rows anymore
    mbarrier.wait(full.index(stage), number // 2 % 2)
    score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    grad = warpgroup_mma(v, grad_out.permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    score = packed_scores(
        score, half_alpha, key_times, first, row_times, first_row, (history_end, rule[3]), tables,
        TEXTS[0], TEXTS[1],
    )  # fmt: skip
    if number + 1 < count:
        load_block(number + 1, tile, runs, loading[0], loading[1], buffers, full)
    weight, slope = silu_and_slope(score, first_row, first, history_end, masked, rule, RULE)
    weight = gl.convert_layout(weight.to(dtype), operand)
    grad_v = warpgroup_mma(weight, grad_out, grad_v, is_async=True)
    grad = warpgroup_mma_wait(1, deps=(grad,))
    grad = grad * slope
    rounded = grad.to(dtype)
    ds.store(rounded)
    fence_async_shared()
    gl.thread_barrier()
    grad_q = warpgroup_mma(k.permute((1, 0)), ds, nothing, use_acc=False, is_async=True)
    grad_k = warpgroup_mma(gl.convert_layout(rounded, operand), q, grad_k, is_async=True)
    grad_q = warpgroup_mma_wait(1, deps=(grad_q,))
    gl.thread_barrier()  # dS has been read
    rows_buffer.reshape([STRIP, STRIP]).permute((1, 0)).store(grad_q)
    fence_async_shared()
    gl.thread_barrier()
    end, row = start.to(gl.int32) + length, RAGGED_ROWS - length + first_row
    async_add_to_global(rows_desc, [RAGGED_ROWS, end, row, row_column], rows_buffer)
    add_to_tables(
        grad, key_times, first, row_times, first_row, (history_end, rule[3]), tables, tables[3],
        TEXTS[2], TEXTS[3],
    )  # fmt: skip
    return warpgroup_mma_wait(0, deps=(grad_k, grad_v))


@gluon.jit
def store_keys(grad, pointer, tile, head, num_heads):
    """Writes dK or dV of the tile's keys."""
    start, length, first = tile[0], tile[1], tile[3]
    j = first + gl.arange(0, STRIP, gl.SliceLayout(1, grad.type.layout))
    column = gl.arange(0, STRIP, gl.SliceLayout(0, grad.type.layout))
    place = gl.expand_dims(((start + j) * num_heads + head) * STRIP, 1) + gl.expand_dims(column, 0)
    gl.store(pointer + place, grad.to(pointer.dtype.element_ty), mask=gl.expand_dims(j < length, 1))


@gluon.jit(do_not_specialize=["num_heads", "copies", *VARYING])
def biased_kernel(
    q_desc, k_desc, v_desc, g_desc, rows_desc, grad_k, grad_v, items, num_heads,
    stride_q, stride_k, stride_v, stride_g,
    alpha, inverse_scale, num_contextual, window, prefix, group_size,
    position_table, time_table, near, records,
    timestamps, behind, key_bounds, next_timestamps, ahead, row_bounds,
    position_stride, time_stride, reach, num_buckets,
    position_sums, time_sums, copies,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    BIAS_TEXT: gl.constexpr, BIAS_CONSTRAINTS: gl.constexpr, BEGIN_TEXT: gl.constexpr,
    TABLES_TEXT: gl.constexpr, TABLES_CONSTRAINTS: gl.constexpr, FINISH_TEXT: gl.constexpr,
):  # fmt: skip
    """Computes grad_k and grad_v [T, H, 64], contiguous. One program runs per item and head, heads fastest.

    The strides are those of a head, in elements. Zero-initialized sums that programs add to: `rows_desc`,
    float32 [T, H, 64], dQ without the factor alpha / (2 scale_len); position_sums and time_sums, as in
    `triton_kernels.keys_kernel`.
    """
    RULE: gl.constexpr = (WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS)
    TEXTS: gl.constexpr = (BIAS_TEXT, BIAS_CONSTRAINTS, TABLES_TEXT, TABLES_CONSTRAINTS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STRIP, 16])
    thread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_buffer = new_buffers(q_desc, 2)
    g_buffer = new_buffers(g_desc, 2)
    k_buffer = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_buffer = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    rows_buffer = gl.allocate_shared_memory(gl.float32, rows_desc.block_shape, rows_desc.layout)
    full = new_barriers(3)
    init_barriers(full, 3, 1)
    fence_async_shared()
    gl.thread_barrier()

    head = (gl.program_id(0) % num_heads).to(gl.int64)
    own = gl.program_id(0) // num_heads
    item = items + own.to(gl.int64) * NUM_COLUMNS
    tile, runs = load_tile(item), load_runs(item)
    buffers = (q_buffer, g_buffer, k_buffer, v_buffer)
    loading = ((q_desc, g_desc), ((head * stride_q).to(gl.int32), (head * stride_g).to(gl.int32)))
    key_columns = ((head * stride_k).to(gl.int32), (head * stride_v).to(gl.int32))
    load_pair((k_desc, v_desc), tile, tile[3], key_columns, full.index(2), (k_buffer, v_buffer))
    count = num_blocks(runs)
    load_block(0, tile, runs, loading[0], loading[1], buffers, full)  # each key is seen by its own row

    part = (own % copies) * num_heads + head
    lookup = time_table + head * time_stride
    tables = (
        position_table + head * position_stride + reach,
        lookup,
        records_of(records, own),
        position_sums + part * (2 * reach + 1) + reach,
    )
    gl.inline_asm_elementwise(
        BEGIN_TEXT, "=r,r,l", [gl.arange(0, THREADS, thread), lookup.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    times = ((tile[1], timestamps, behind, near), (tile[1], next_timestamps, ahead, tile[0]))
    rule = (num_contextual, window, prefix, group_size)
    sum_k = gl.zeros([STRIP, STRIP], gl.float32, layout)
    sum_v = gl.zeros([STRIP, STRIP], gl.float32, layout)
    mbarrier.wait(full.index(2), 0)
    for number in range(count):
        sum_k, sum_v = add_block(
            (sum_k, sum_v), number, count, tile, runs, rule, 0.5 * alpha, loading, buffers, full, rows_desc,
            rows_buffer, (head * STRIP).to(gl.int32), times, tables, RULE, TEXTS,
        )  # fmt: skip
    tma.store_wait(0)
    store_keys(sum_k * (0.5 * alpha * inverse_scale), grad_k, tile, head, num_heads)
    store_keys(sum_v * inverse_scale, grad_v, tile, head, num_heads)
    gl.inline_asm_elementwise(
        FINISH_TEXT, "=r,r,l,r",
        [gl.arange(0, THREADS, thread), (time_sums + part * num_buckets).to(gl.int64), num_buckets],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
