"""The Triton backend of `segment_sum`: each sum has one owner, long segments are summed in pieces.

This module itself needs no Triton: the kernels are in `triton_kernels`, their launch in `triton_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from recsys.ops.segment_sum import SegmentFacts

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: SegmentFacts) -> Support:
    """What any Triton backend can do.

    In an exported graph for those who name it: no package with these kernels has passed a test in threads.
    """
    able = triton_support.support(facts.device, facts.dtype)
    return able._replace(auto=False) if facts.exported else able


def run(values: Tensor, lengths: Tensor) -> Tensor:
    """In float32, in an order that depends on nothing but the lengths."""
    ops = triton_support.load(_OPS)
    compute = ops.segment_sum_triton if torch.compiler.is_compiling() else ops.SegmentSum.apply
    return compute(values, lengths)
