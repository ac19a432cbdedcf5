"""The Triton backend of `top_k`: rounded scores rule out nearly all items, exact scores decide among the
rest.

This module itself needs no Triton: the kernels are in `triton_kernels`, their launch in `triton_launch`.
"""

from __future__ import annotations

from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from recsys.ops.top_k import TopK, TopKFacts

MAX_WIDTH = 512
MAX_K = 256

_LAUNCH = f"{__name__.rpartition('.')[0]}.triton_launch"

triton_support.preload(_LAUNCH)


def supports(facts: TopKFacts) -> Support:
    """Supports what `triton_support.support` does, for rows that fit a program and up to `MAX_K` items per
    query."""
    able = triton_support.support(facts.device, facts.dtype)
    if not able.ok:
        return able
    if not 0 < facts.width <= MAX_WIDTH:
        reason = f"vectors have {facts.width} numbers, it takes 1 to {MAX_WIDTH}"
        return able._replace(ok=False, reason=reason)
    if facts.k > MAX_K:
        return able._replace(ok=False, reason=f"{facts.k} items are wanted, it finds up to {MAX_K}")
    return able


def run(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopK:
    """Runs `top_k`; the arguments have been validated."""
    return triton_support.load(_LAUNCH).run(queries, items, k, removed, removed_lengths)
