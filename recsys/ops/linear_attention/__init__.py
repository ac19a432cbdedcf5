"""Defines `linear_attention`: a recurrence over jagged samples in which each head's state is a decaying
matrix.

Its time grows linearly with the length of a sample, that of attention quadratically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.attention_args import check_attention, scale_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_float, check_number
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "LinearAttention", "linear_attention"]

_CAUSAL = AttentionMask()


class LinearAttention(NamedTuple):
    """Result of `linear_attention`."""

    out: Tensor
    """[T, H, V], dtype of v."""
    final_state: Tensor
    """[B, H, D, V], float32 or wider: the state after each history, from which a later call can continue."""


class Inputs(NamedTuple):
    """The floating point tensors of a call; see `linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    initial_state: Tensor


@dataclass(frozen=True)
class LinearAttentionFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtype: torch.dtype
    qk_dim: int
    v_dim: int


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    layout: SequenceLayout,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> LinearAttention:
    """Computes `S_i = diag(exp(log_decay_i)) S_(i-1) + k_i v_i^T` and `out_i = scale S_i^T q_i` per head.

    With `beta` the recurrence is the delta rule, which replaces the value that the state returns for a key
    instead of adding to it:
    `S_i = (I - beta_i k_i k_i^T) diag(exp(log_decay_i)) S_(i-1) + beta_i k_i v_i^T`.

    The recurrence runs over contextual tokens, then history. Each target continues separately from the state
    after the history: it sees no other target and does not change `final_state`.

    For its backward pass the Triton backend keeps, beside the inputs, for each token and head: the decays
    summed in twice the bits of q, and in the type of q 64 scores, q and k with their decays, and D V / 64
    numbers of states. With bfloat16 and D = V = 128 these are 1,664 bytes, or 1,156 with one decay per head.
    The delta rule keeps 64 float32 numbers more, and as many as k and v have: here 768 bytes. A traced graph
    keeps only its inputs, and computes the rest again.

    Args:
        q: [T, H, D] floating point; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V], dtype and device of q; V may differ from D.
        log_decay: [T, H, D], or [T, H] for one number per head; finite and floating point, at most 0 in a
            state that forgets. It decays the state before token i is added.
        beta: [T, H] floating point, the share of the state's value for a key that is replaced. Nothing else
            is forgotten if keys have length 1 and beta is in [0, 1]; longer keys let the state grow.
        scale: None for `1 / sqrt(D)`; an explicit 0.0 means 0.0.
        initial_state: [B, H, D, V] floating point, the state before each sample; None for zeros.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        Output and final state, both differentiable in q, k, v, log_decay, beta and initial_state, and summed
        in float32 or wider.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Yang et al., Gated Linear Attention Transformers, arXiv 2312.06635, its recurrent form; the delta
    rule with a decay as in Yang et al., Gated Delta Networks, arXiv 2412.06464.
    """
    check_attention(q, k, v, layout, _CAUSAL)
    if scale is not None:
        check_number("scale", scale)
    _check_state(q, v, log_decay, beta, initial_state, layout)
    chosen = OP.select(LinearAttentionFacts(q.device.type, q.dtype, q.shape[2], v.shape[2]), backend)
    scale = scale_of(q) if scale is None else scale
    if initial_state is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        initial_state = q.new_zeros(layout.batch_size, *q.shape[1:], v.shape[2], dtype=wide)
    inputs = Inputs(q, k, v, log_decay, beta, initial_state)
    return LinearAttention(*chosen.run(inputs, layout, scale))


def _check_state(
    q: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    layout: SequenceLayout,
) -> None:
    check_float("log_decay", log_decay, "q", q)
    shape = tuple(q.shape)
    if tuple(log_decay.shape) not in (shape, shape[:2]):
        raise ValueError(
            f"log_decay must have the shape of q, {shape}, or {shape[:2]}, got {tuple(log_decay.shape)}"
        )
    if beta is not None:
        check_float("beta", beta, "q", q)
        if tuple(beta.shape) != shape[:2]:
            raise ValueError(f"beta must have shape {shape[:2]}, got {tuple(beta.shape)}")
    if initial_state is not None:
        check_float("initial_state", initial_state, "q", q)
        expected = (layout.batch_size, *shape[1:], v.shape[2])
        if tuple(initial_state.shape) != expected:
            raise ValueError(
                f"initial_state must have shape [samples, heads, D, V] = {expected}, got "
                f"{tuple(initial_state.shape)}"
            )


MAX_WIDTH = 128


def supports_triton(facts: LinearAttentionFacts) -> Support:
    """Answers as `triton_support.support` does, for at most 128 key or value columns per head."""
    able = triton_support.support(facts.device, facts.dtype)
    width = max(facts.qk_dim, facts.v_dim)
    if able.ok and width > MAX_WIDTH:
        return able._replace(ok=False, reason=f"a head has {width} columns, it takes up to {MAX_WIDTH}")
    return able


OP = Op("linear_attention", __name__, backends=("triton", "reference"))
