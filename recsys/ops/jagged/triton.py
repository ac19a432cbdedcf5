"""The Triton backend of `gather_rows`: one kernel forward, the same kernel on the inverse map backward.

This module itself needs no Triton: kernels and launches are in `triton_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys.ops.jagged import GatherFacts
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_ITEMSIZE = 8
"""Largest integer, in bytes, as which rows are moved."""

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: GatherFacts) -> Support:
    """Support any dtype, since bits are moved; with several maps gradients are added in float32.

    Exported graphs must name this backend: packages with these kernels have not yet passed a multithreading
    test.
    """
    added = facts.num_maps > 1 and facts.dtype.is_floating_point
    able = triton_support.support(facts.device, facts.dtype if added else torch.float32)
    if facts.exported:
        able = able._replace(auto=False)
    if able.ok and facts.dtype.itemsize > MAX_ITEMSIZE:
        reason = f"a number of {facts.dtype} has {facts.dtype.itemsize} bytes, it takes up to {MAX_ITEMSIZE}"
        return able._replace(ok=False, reason=reason)
    return able


def run(values: Sequence[Tensor], index: Sequence[Tensor], inverse: Tensor | None) -> Tensor:
    """Move rows without concatenating sources, forward and backward."""
    ops = triton_support.load(_OPS)
    joined = index[0] if len(index) == 1 else torch.cat(list(index))
    if torch.compiler.is_compiling():
        return ops.gather_rows_triton(list(values), joined, inverse, [tensor.shape[0] for tensor in index])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in values):
        return ops.GatherRows.apply(joined, inverse, [tensor.shape[0] for tensor in index], *values)
    return ops.launch_gather(values, joined)
