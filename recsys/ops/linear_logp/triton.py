"""The Triton backend of `linear_logp`: tiles over rows and candidates, and memory for only a few numbers per
row.

The modules of kernels are imported when one of them runs, so that this module works without Triton.
"""

from __future__ import annotations

from recsys.ops.linear_logp import LogpFacts
from recsys.ops.linear_logp.recompute import Backend
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_WIDTH = {2: 512, 4: 128}
"""Widest rows of hidden, in columns, by bytes per entry."""

LIBRARY_FROM = 64
"""Width in columns above which the library's float32 products are faster, forward and backward together."""

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: LogpFacts) -> Support:
    """Supports what `triton_support.support` does, up to `MAX_WIDTH`: a program holds whole rows of its
    operand.

    "auto" leaves wide float32 rows to the reference, whose library products are faster.
    """
    able = triton_support.support(facts.device, facts.dtype)
    if facts.dtype.itemsize == 4 and facts.width > LIBRARY_FROM:
        able = able._replace(auto=False)
    if not able.ok or facts.width <= (max_width := MAX_WIDTH[facts.dtype.itemsize]):
        return able
    reason = f"hidden has {facts.width} columns, in {facts.dtype} it takes up to {max_width}"
    return able._replace(ok=False, reason=reason)


def backend() -> Backend:
    """Returns the loops over scores."""
    return triton_support.load(_OPS).BACKEND
