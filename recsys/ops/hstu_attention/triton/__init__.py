"""The Triton backend of `hstu_attention`: what it supports, and the entry to its kernels.

This module itself needs no Triton. `forward` and `backward` hold the kernels, `tile` holds what they share,
and `bias` holds the kernels for a relative bias. `work_list` lists the tiles that they work on, `launch`
launches them, and `ops` makes them differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_DIM = 256

_OPS = f"{__name__}.ops"

triton_support.preload(_OPS)


def supports(facts: AttentionFacts) -> Support:
    """Support what any Triton backend supports, with heads of up to 256 columns."""
    able = triton_support.support(facts.device, facts.dtype)
    for name, dim in (("qk_dim", facts.qk_dim), ("v_dim", facts.v_dim)):
        if able.ok and dim > MAX_DIM:
            return able._replace(ok=False, reason=f"{name} is {dim}, it takes up to {MAX_DIM}")
    return able


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Run the kernels: scores, sums and bias are float32; work and memory grow with the tokens present, not
    with padding."""
    ops = triton_support.load(_OPS)
    if torch.compiler.is_compiling():
        return ops.call_op(q, k, v, problem)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if problem.bias is None and not needs_grad:
        return ops.launch.forward(q, k, v, problem)
    return ops.HstuAttention.apply(q, k, v, *problem.tables, problem)
