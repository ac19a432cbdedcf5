"""Rounds float32 sums to the 16 bits of a gradient in one pass over memory."""

import triton
import triton.language as tl

LINE = 64
"""Elements per line. The total is a multiple of it, so that no access is narrower than 16 bytes."""


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
