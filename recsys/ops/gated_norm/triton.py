"""The Triton backend of `gated_norm`: one kernel forward, one backward.

This module itself needs no Triton: kernels and launches are in `triton_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.gated_norm import GateFacts, GateInputs, GateOptions
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from recsys.ops.runtime.gradient_buffer import GradientBuffer

MAX_WIDTH = 4096

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: GateFacts) -> Support:
    """Supports what `triton_support.support` does, for groups of up to 4096 columns: a program holds whole
    groups."""
    able = triton_support.support(facts.device, facts.dtype)
    if able.ok and facts.group_width > MAX_WIDTH:
        reason = f"a group has {facts.group_width} columns, it takes up to {MAX_WIDTH}"
        return able._replace(ok=False, reason=reason)
    return able


def run(inputs: GateInputs, grad_buffer: GradientBuffer | None, options: GateOptions) -> Tensor:
    """Computes in float32. Backward reads a, u and the gradient once; forward stores nothing else."""
    ops = triton_support.load(_OPS)
    if torch.compiler.is_compiling():
        return ops.gated_norm_triton(*inputs, *options)
    return ops.GatedNorm.apply(*inputs, grad_buffer, options)
