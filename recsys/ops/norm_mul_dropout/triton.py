"""The Triton backend of `norm_mul_dropout`: one kernel forward, one backward.

This module itself needs no Triton: the kernels are in `triton_kernels`, their launch in `triton_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops import triton_backend
from recsys.ops.dispatch import Support
from recsys.ops.norm_mul_dropout import GateFacts

MAX_WIDTH = 4096

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_backend.preload(_OPS)


def supports(facts: GateFacts) -> Support:
    """What any Triton backend can do, with groups of up to 4096 columns: a program holds whole groups."""
    able = triton_backend.support(facts.device, facts.dtype)
    if able.ok and facts.group_width > MAX_WIDTH:
        reason = f"a group has {facts.group_width} columns, it takes up to {MAX_WIDTH}"
        return able._replace(ok=False, reason=reason)
    return able


def run(
    attended: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    eps: float,
    concat: bool,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """In float32. Backward reads a, u and the gradient once, and keeps nothing else from forward."""
    ops = triton_backend.load(_OPS)
    compute = ops.norm_mul_dropout_triton if torch.compiler.is_compiling() else ops.NormMulDropout.apply
    return compute(attended, u, weight, bias, seed, num_groups, eps, concat, dropout)
