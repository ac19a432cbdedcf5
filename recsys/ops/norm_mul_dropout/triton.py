"""The Triton backend of `norm_mul_dropout`: one kernel forward, one backward.

This module itself needs no Triton: the kernels are in `triton_kernels`, their launch in `triton_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops import triton_backend
from recsys.ops.dispatch import Support
from recsys.ops.gradient_room import GradientRoom
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
    silu: bool,
    room: GradientRoom | None,
) -> Tensor:
    """In float32. Backward reads a, u and the gradient once, and keeps nothing else from forward."""
    ops = triton_backend.load(_OPS)
    options = (num_groups, eps, concat, dropout, silu)
    if torch.compiler.is_compiling():
        return ops.norm_mul_dropout_triton(attended, u, weight, bias, seed, *options)
    return ops.NormMulDropout.apply(attended, u, weight, bias, seed, room, *options)
