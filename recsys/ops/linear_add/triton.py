"""The Triton backend of `linear_add`: products by cuBLAS, which adds x where it can; sums by a kernel.

This module itself needs no Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.linear_add import LinearAddFacts
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: LinearAddFacts) -> Support:
    """What any Triton backend can do, in eager mode."""
    able = triton_support.support(facts.device, facts.dtype)
    if able.ok and torch.compiler.is_compiling():
        return able._replace(ok=False, reason="a compiler makes kernels of the reference", auto=False)
    return able


def run(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, in_place: bool) -> Tensor:
    """Backward adds up gradients of the parameters in float32."""
    ops = triton_support.load(_OPS)
    if in_place:
        return ops.forward_in_place(x, y, weight, bias)
    return (ops.LinearAdd.apply if torch.is_grad_enabled() else ops.forward)(x, y, weight, bias)
