"""Launches the Hopper forward and one-pass backward kernels; decides their sizes and the order of the
work."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.hstu_attention.hopper.backward import backward_kernel
from recsys.ops.hstu_attention.hopper.forward import forward_kernel
from recsys.ops.hstu_attention.mask_forms import rule_of, rules
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import STRIP
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

LONG_SIZES = {
    64: ForwardSizes(64, 6, 3, True, 160, 32, 2),
    128: ForwardSizes(64, 4, 3, False, 160, 32, 2),
}
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


class BackwardSizes(NamedTuple):
    """Sizes of the one-pass backward kernel for one head width."""

    rows: int  # BLOCK_M, rows per block
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    v_stages: int  # buffers for tiles of values; keys have two
    computing_registers: int
    loading_registers: int


BACKWARD_STRIPS = 2
"""Strips of 64 keys per tile."""

BACKWARD_SIZES = {
    64: BackwardSizes(64, 4, 2, 240, 24),
    128: BackwardSizes(64, 2, 1, 240, 24),
}
"""Sizes by head width, in columns."""

LINE = 64
"""Elements per line of `round_kernel`. The total is a multiple of it, so that no access is narrower than 16
bytes."""

ROUNDED_LINES = 64
"""Lines per program of `round_kernel`."""


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
    num_items = items.shape[0]
    launch(
        forward_kernel,
        (q.dtype, dim, mask, sizes),
        programs_for(q.device, num_items * num_heads),
        (
            Boxes(q, STRIP.value, dim),
            Boxes(k, sizes.keys, dim),
            Boxes(v, sizes.keys, dim),
            Boxes(out, STRIP.value, dim),
        ),
        (items, counter_for(q.device, captured)),
        (num_items, num_heads, q.stride(1), k.stride(1), v.stride(1), *scalars(problem)),
        lambda: forward_constants(dim, sizes, mask),
    )
    return out


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    sizes: BackwardSizes | None = None,
    *,
    captured: bool = True,
) -> Gradients:
    """Computes the gradients of q, k and v, [T, H, D]; dQ is summed in any order. The arguments are those of
    `forward`."""
    total_len, num_heads, dim = q.shape
    gradients = problem.gradient_memory(q, k, v)
    if total_len == 0:
        return Gradients(*gradients)
    sizes = sizes or BACKWARD_SIZES[dim]
    mask, layout, device = problem.mask, problem.layout, q.device
    keys = STRIP.value * BACKWARD_STRIPS
    q, k, v, grad_out = map(with_loadable_rows, (q, k, v, grad_out))
    items = key_work(mask, layout, keys, sizes.rows, section_of(num_heads * dim * 8, mask), problem.tail)
    sums = torch.zeros(total_len, num_heads, dim, dtype=torch.float32, device=device)
    launch(
        backward_kernel,
        (q.dtype, dim, mask, sizes),
        programs_for(device, items.shape[0] * num_heads),
        (
            Boxes(q, sizes.rows, dim),
            Boxes(grad_out, sizes.rows, dim),
            Boxes(k, keys, dim),
            Boxes(v, keys, dim),
            Boxes(sums, sizes.rows, dim // BACKWARD_STRIPS),
            Boxes(gradients[1], STRIP.value, dim),
            Boxes(gradients[2], STRIP.value, dim),
        ),
        (items, counter_for(device, captured)),
        (
            items.shape[0],
            num_heads,
            q.stride(1),
            grad_out.stride(1),
            k.stride(1),
            v.stride(1),
            *scalars(problem),
        ),
        lambda: {**constants_of(sizes, mask), "D": dim},
    )
    round_to(gradients[0], sums, 0.5 * problem.alpha / problem.scale_len, even_first=True)
    return Gradients(*gradients)


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


def constants_of(sizes: BackwardSizes, mask: AttentionMask) -> dict[str, int | bool]:
    """Returns the compile-time constants of the backward kernel, except the head width, by parameter name."""
    return {
        "BLOCK_M": sizes.rows,
        "STAGES": sizes.stages,
        "V_STAGES": sizes.v_stages,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(mask),
    }


def round_to(rounded: Tensor, sums: Tensor, factor: float, *, even_first: bool = False) -> None:
    """Writes `rounded = sums * factor`, [T, H, D] with D a multiple of 64. Rows of `rounded` need not be
    contiguous.

    `even_first`: every eight columns of `sums` hold columns 0, 2, 4, 6, 1, 3, 5, 7 of the result.
    """
    if sums.device.type != "cuda":  # in the emulator
        if even_first:
            sums = sums.unflatten(2, (-1, 2, 4)).transpose(3, 4).flatten(2)
        torch.mul(sums, factor, out=rounded)
        return
    num_lines, in_row = sums.numel() // LINE, sums[0].numel() // LINE
    launch(
        round_kernel,
        (rounded.dtype, in_row, rounded.stride(0), even_first),
        -(-num_lines // ROUNDED_LINES),
        (),
        (sums, rounded),
        (num_lines, factor),
        lambda: {
            "IN_ROW": in_row,
            "STRIDE": rounded.stride(0),
            "LINES": ROUNDED_LINES,
            "LINE": LINE,
            "EVEN_FIRST": even_first,
            "num_warps": WARPS,
        },
    )


@triton.jit(do_not_specialize=["num_lines"])
def round_kernel(
    sums, rounded, num_lines, factor,
    IN_ROW: tl.constexpr, STRIDE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    EVEN_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes `rounded = sums * factor`, [num_lines, LINE], last lines first: they are still in the cache.

    Rows have IN_ROW lines each; they are STRIDE elements apart in `rounded` and contiguous in `sums`.
    EVEN_FIRST: in `sums` every eight elements hold elements 0, 2, 4, 6, 1, 3, 5, 7 of the result.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    line = program * LINES + tl.arange(0, LINES)[:, None]
    within = tl.arange(0, LINE)[None, :]
    value = tl.load(sums + line.to(tl.int64) * LINE + within, mask=line < num_lines)
    place = (line // IN_ROW).to(tl.int64) * STRIDE + (line % IN_ROW) * LINE + within
    value = (value * factor).to(rounded.dtype.element_ty)
    if EVEN_FIRST:
        eights = tl.reshape(value, LINES, LINE // 8, 2, 4)
        value = tl.reshape(tl.permute(eights, 0, 1, 3, 2), LINES, LINE)
    tl.store(rounded + place, value, mask=line < num_lines)


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
