"""The Triton backend of `linear_attention`: chunks of 64 tokens, tensor cores, states in float32.

This module itself needs no Triton: `triton_chunks` has the kernels that work on each chunk alone,
`triton_scan` those that carry the state from chunk to chunk, `triton_launch` launches them, and `triton_ops`
makes them differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.linear_attention import Inputs, LinearAttentionFacts
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_WIDTH = 128

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: LinearAttentionFacts) -> Support:
    """Answers as `triton_support.support` does, for at most 128 key or value columns per head."""
    able = triton_support.support(facts.device, facts.dtype)
    width = max(facts.qk_dim, facts.v_dim)
    if able.ok and width > MAX_WIDTH:
        return able._replace(ok=False, reason=f"a head has {width} columns, it takes up to {MAX_WIDTH}")
    return able


def run(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, V] and the final state [B, H, D, V]; the arguments have been validated."""
    ops = triton_support.load(_OPS)
    if torch.compiler.is_compiling():
        facts = (layout.lengths, layout.offsets, layout.num_targets)
        return ops.linear_attention_triton(*inputs, *facts, scale)
    return ops.LinearAttentionFunction.apply(*inputs, layout, scale)
