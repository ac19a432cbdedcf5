"""The Triton backend of `norm_linear`: kernels for norms and sums, cuBLAS for products.

This module itself needs no Triton: kernels and launches are in `triton_ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recsys.ops.norm_linear import NormLinear, NormLinearFacts, NormLinearInputs, NormLinearOptions
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from recsys.ops.runtime.gradient_buffer import GradientBuffer

MAX_WIDTH = 4096

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: NormLinearFacts) -> Support:
    """Supports what `triton_support.support` does, in eager mode, for rows of up to 4096 columns: a program
    holds whole rows."""
    able = triton_support.support(facts.device, facts.dtype)
    if able.ok and facts.compute_dtype not in triton_support.DTYPES:
        able = able._replace(ok=False, reason=f"it computes in 16 or 32 bits, not {facts.compute_dtype}")
    if able.ok and torch.compiler.is_compiling():
        return able._replace(ok=False, reason="a compiler makes kernels of the reference", auto=False)
    if able.ok and facts.width > MAX_WIDTH:
        return able._replace(ok=False, reason=f"x is {facts.width} wide, it takes up to {MAX_WIDTH}")
    return able


def run(inputs: NormLinearInputs, widths: tuple[int, ...], options: NormLinearOptions) -> NormLinear:
    """Computes statistics and gradients of parameters in float32."""
    ops = triton_support.load(_OPS)
    if not torch.is_grad_enabled():
        joined = ops.forward(inputs, options)
        if options.silu:
            joined = F.silu(joined, inplace=True)
        return NormLinear(tuple(joined.split(widths, dim=1)), inputs.x, None)
    grad_buffer = GradientBuffer(widths)
    residual, *parts = ops.NormLinear.apply(*inputs, grad_buffer, options)
    return NormLinear(tuple(parts), residual, grad_buffer)
