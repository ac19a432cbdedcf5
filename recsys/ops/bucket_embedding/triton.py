"""The Triton backend of `bucket_embedding`: one kernel forward, sorted segment sums backward.

This module itself needs no Triton: kernels and launches are in `triton_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys.ops.bucket_embedding import BucketFacts, reference
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support, is_exporting

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: BucketFacts) -> Support:
    """Supports what `triton_support.support` does, for the dtypes of all tensors."""
    answers = [triton_support.support(facts.device, dtype) for dtype in facts.dtypes]
    return next((answer for answer in answers if not answer.ok), answers[0])


def run(x: Tensor, tables: Sequence[Tensor], buckets: Sequence[Tensor], scale: float) -> Tensor:
    """Computes in float32. In a traced graph the compiler fuses the sum with adjacent operations."""
    if is_exporting():  # no gradient is needed
        return reference.run(x, tables, buckets, scale)
    ops = triton_support.load(_OPS)
    if not torch.compiler.is_compiling():
        return ops.BucketEmbedding.apply(x, scale, buckets, *tables)
    out = x if scale == 1 else x * scale
    for table, rows in zip(tables, buckets, strict=True):
        out = out + ops.LookUp.apply(table, rows)
    return out
