"""The Hopper backend of `hstu_attention`: hand-scheduled kernels.

This module itself needs no Triton. The kernels are written in Gluon, a part of Triton that changes between
versions:

    forward          the outputs
    backward         all gradients in one pass, where sums in any order are allowed, heads are not too wide
                     and rows see many keys
    backward_keys    the first of two passes: dK and dV (backward_wide for wide heads)
    backward_rows    the second pass: dQ
    packaged         the outputs, by the kernel of `forward`, in packages

`launch` and `two_pass` launch them, and `ops` makes them differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import embedding, triton_support
from recsys.ops.runtime.dispatch import Support

WIDTHS = (64, 128, 256)
"""Head widths, in columns, for which `launch` has sizes."""

_OPS = f"{__name__}.ops"

triton_support.preload_gluon(_OPS)


def supports(facts: AttentionFacts) -> Support:
    """Supports 16-bit heads with q, k and v of equal width and no bias, on a Hopper GPU."""
    able = triton_support.hopper_support(facts.device, facts.dtype)
    missing = _missing_from_the_call(facts) if able.ok else ""
    return able._replace(ok=False, reason=missing) if missing else able


def _missing_from_the_call(facts: AttentionFacts) -> str:
    if facts.has_bias:
        return "it has no relative bias"
    if facts.dtype.itemsize != 2:
        return f"it takes bfloat16 and float16, not {facts.dtype}"
    if facts.qk_dim != facts.v_dim or facts.qk_dim not in WIDTHS:
        return f"it takes heads of {WIDTHS} for q, k and v alike, not {facts.qk_dim} and {facts.v_dim}"
    return embedding.reason_against()


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Runs the kernels: scores and sums are float32, weights are rounded to the dtype of v."""
    ops = triton_support.load(_OPS)
    if torch.compiler.is_compiling():
        return ops.call_op(q, k, v, problem)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return ops.HstuAttention.apply(q, k, v, None, None, problem)
    return ops.forward(q, k, v, problem)
