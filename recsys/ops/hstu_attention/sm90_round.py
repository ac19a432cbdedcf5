"""Rounds sums in float32 to the 16 bits of a gradient, one pass over memory."""

import triton
import triton.language as tl

LINE = 64
"""Numbers: the count is a multiple of it, so that no access is narrower than 16 bytes."""


@triton.jit(do_not_specialize=["num_lines"])
def round_kernel(sums, rounded, num_lines, factor, LINES: tl.constexpr, LINE: tl.constexpr):
    """`rounded = sums * factor`, [num_lines, LINE]; the last first, which are still in the cache."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    line = program * LINES + tl.arange(0, LINES)[:, None]
    place = line.to(tl.int64) * LINE + tl.arange(0, LINE)[None, :]
    value = tl.load(sums + place, mask=line < num_lines)
    tl.store(rounded + place, (value * factor).to(rounded.dtype.element_ty), mask=line < num_lines)
