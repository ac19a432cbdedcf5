"""The Triton backend of `linear_attention`: chunks of 64 tokens, tensor cores, states in float32.

This module itself needs no Triton: `triton_chunks` has the kernels that work on each chunk alone,
`triton_scan` those that carry the state from chunk to chunk, and `triton_ops` their launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.linear_attention import LinearAttentionFacts
from recsys.ops.linear_attention.reference import zero_state
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


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    layout: SequenceLayout,
    *,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, V] and the final state [B, H, D, V]; the arguments have been validated."""
    ops = triton_support.load(_OPS)
    if initial_state is None:
        initial_state = zero_state(q, v, layout)
    facts = (layout.lengths, layout.offsets, layout.num_targets)
    if torch.compiler.is_compiling():
        return ops.linear_attention_triton(q, k, v, log_decay, beta, initial_state, *facts, scale)
    return ops.LinearAttentionFunction.apply(q, k, v, log_decay, beta, initial_state, layout, scale)
