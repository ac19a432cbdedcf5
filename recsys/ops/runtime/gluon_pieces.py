"""Pieces of Gluon kernels for Hopper that several ops share: barriers, boxes of rows, cursors, instructions.

A kernel has one warp that loads and warp groups that compute. Operands pass through rings of buffers in
shared memory. Each buffer has two barriers: the copy engine or a warp arrives at `full` when the buffer has
been filled, and its readers arrive at `free` when they have read it. A cursor is a buffer's number in the
ring and the parity of its barriers in this round; waiting for the parity before the first returns at once.

Everything here is inlined. This module needs Gluon.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from recsys.ops.runtime import descriptors

STRIP = gl.constexpr(64)
"""Rows per warp group: those of one matrix instruction."""

RAGGED_ROWS = gl.constexpr(descriptors.RAGGED_ROWS)
ANY_ROWS = gl.constexpr(descriptors.ANY_ROWS)
STEP_BACK = gl.constexpr(descriptors.STEP_BACK)


@gluon.jit
def ragged_descriptor(base, row, width, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Makes on the GPU what `descriptors.gluon_descriptor` makes on the host, for boxes [ROWS, COLUMNS] of
    rows that are `row` elements of 16 bits apart and `width` elements long."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    row = gl.to_tensor(row).to(gl.int64)
    return tma.make_tensor_descriptor(
        base, [ANY_ROWS, ANY_ROWS, RAGGED_ROWS, width], [STEP_BACK - row, row, row, 1], [1, 1, ROWS, COLUMNS],
        layout,
    )  # fmt: skip


@gluon.jit
def new_buffers(desc, COUNT: gl.constexpr):
    """Allocates shared memory for `COUNT` boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)


@gluon.jit
def new_slots(COUNT: gl.constexpr, NUMBERS: gl.constexpr = 1):
    """Allocates shared memory for messages between warps: `COUNT` slots of `NUMBERS` int32 each."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """Allocates `COUNT` barriers in shared memory, not yet initialized."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def new_ring(STAGES: gl.constexpr):
    """Allocates the barriers of a ring of `STAGES` buffers, full and free, not yet initialized."""
    return new_barriers(STAGES), new_barriers(STAGES)


@gluon.jit
def init_barriers(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Initializes `COUNT` barriers, each for `ARRIVALS` arrivals per round."""
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)


@gluon.jit
def init_rings(rings, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Initializes the barriers of rings of `STAGES` buffers; `rings` holds (full, free) for each ring. A
    buffer is full after one arrival, and free after one arrival from each of `READERS` readers."""
    for stage in gl.static_range(STAGES):
        for ring in gl.static_range(len(rings)):
            mbarrier.init(rings[ring][0].index(stage), count=1)
            mbarrier.init(rings[ring][1].index(stage), count=READERS)


@gluon.jit
def next_stage(cursor, STAGES: gl.constexpr):
    """Returns the cursor of the next buffer of a ring."""
    stage, parity = cursor
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, parity ^ 1, parity)


@gluon.jit
def previous_stage(cursor, STAGES: gl.constexpr):
    """Returns the cursor that precedes `cursor`. (A loop could not carry it as a second variable: the two
    start equal.)"""
    stage, parity = cursor
    first = stage == 0
    return gl.where(first, STAGES - 1, stage - 1), gl.where(first, parity ^ 1, parity)


@gluon.jit
def skip_blocks(count, cursor, rings, STAGES: gl.constexpr):
    """Frees the buffers of `count` blocks in two rings, whose barriers are (full, free, full, free), without
    reading them. Returns the cursor behind these blocks."""
    for _number in range(count):
        stage, parity = cursor
        mbarrier.wait(rings[0].index(stage), parity)
        mbarrier.arrive(rings[1].index(stage))
        mbarrier.wait(rings[2].index(stage), parity)
        mbarrier.arrive(rings[3].index(stage))
        cursor = next_stage(cursor, STAGES)
    return cursor


@gluon.jit
def load_rows(descriptor, sample, first, column, full, buffer):
    """Starts a copy of a box into `buffer`: rows from `first` on of a sample, columns from `column` on.

    Args:
        sample: first row of the sample in [T], and its length; the tuple may have further items.
        full: the barrier that expects the box.
    """
    start, length = sample[0], sample[1]
    mbarrier.expect(full, descriptor.block_type.nbytes)
    rows = RAGGED_ROWS - length + first
    end = start.to(gl.int32) + length
    tma.async_copy_global_to_shared(descriptor, [RAGGED_ROWS, end, rows, column], full, buffer)


@gluon.jit
def store_rows(descriptor, sample, first, offset, column, buffer):
    """Starts a copy of `buffer` to the rows of a sample from `first + offset` on; rows outside the sample are
    not written."""
    rows = RAGGED_ROWS - sample[1] + first + offset
    end = sample[0].to(gl.int32) + sample[1]
    tma.async_copy_shared_to_global(descriptor, [RAGGED_ROWS, end, rows, column], buffer)


@gluon.jit
def publish(number, slot):
    """Writes a number into a slot of shared memory, where `read_slot` finds it."""
    single: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot.store(gl.full([1], number, gl.int32, single))


@gluon.jit
def read_slot(slot):
    """Reads the number that was published in a slot."""
    single: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(slot.load(single), 0)


@gluon.jit
def tanh(x):
    """Computes tanh in one instruction, to about 11 bits: enough for 16-bit weights."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def opaque(number):
    """Returns the number, hidden from the compiler. If the compiler knew that buffers are the same in all
    blocks, it would compute the descriptors of all instructions before the loop, which takes more registers
    than there are."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@builtin
def async_add_to_global(tensor_desc, coord, src, _semantic=None):
    """Starts to add a box in shared memory to a box of a descriptor; `tma.store_wait` waits for it. Gluon 3.6
    has no such function in `tma`."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )
