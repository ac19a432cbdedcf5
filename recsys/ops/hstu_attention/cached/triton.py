"""Triton backend of `hstu_attention_cached`: it supports what the Triton backend of `hstu_attention`
supports.

This module itself needs no Triton: the kernel and its launch are in `triton_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.hstu_attention.triton import supports
from recsys.ops.runtime import triton_support

__all__ = ["run", "supports"]

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def run(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem) -> Tensor:
    """Run the kernel: scores, sums and bias are float32. The cache is read in place, and only where the mask
    allows."""
    ops = triton_support.load(_OPS)
    compute = ops.call_op if torch.compiler.is_compiling() else ops.forward
    return compute(q, k, v, cache_k, cache_v, problem)
