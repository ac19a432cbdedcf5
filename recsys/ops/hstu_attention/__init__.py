"""`hstu_attention`: attention by SiLU scores, without softmax, over jagged samples."""

from __future__ import annotations

from torch import Tensor

from recsys.ops.attention_args import (
    AttentionFacts,
    attention_facts,
    check_attention,
    check_bias,
    check_number,
    scale_of,
)
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.dispatch import Op
from recsys.ops.runtime.gradient_buffer import GradientRoom

__all__ = ["OP", "hstu_attention"]

_CAUSAL = AttentionMask()


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
    scale_len: float,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    room: GradientRoom | None = None,
    tail: int | None = None,
) -> Tensor:
    """`out[i] = sum_j silu(alpha <q_i, k_j> + bias[i, j]) v_j / scale_len` over the keys `j` that `i` sees, a
    head.

    Args:
        q: [T, H, D] floating point; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V]; V may differ from D.
        mask: who sees whom within a sample.
        alpha: None for `1 / sqrt(D)`; an explicit 0.0 means 0.0.
        scale_len: a positive constant of the model (its maximum length), never a property of the batch: a
            sample's output must not depend on its batch mates.
        bias: relative position and time bias, computed in its tables' dtype and added in that of the scores.
        backend: "auto" takes the first usable one; a named one runs or raises.
        deterministic: whether gradients must be bitwise repeatable; None follows
            `torch.use_deterministic_algorithms`.
        room: where a backend may put the gradients of q, k and v, parts of the room's tensor.
        tail: of the history only the newest `tail` rows of the result are read, beside those of contextual
            tokens and targets. The others, whose q must be zeros, may hold anything.

    Returns:
        [T, H, V]. Differentiable in q, k, v and both tables of the bias.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Zhai et al., Actions Speak Louder than Words (HSTU), arXiv 2402.17152.
    """
    facts = _facts(
        q,
        k,
        v,
        layout,
        mask,
        alpha=alpha,
        scale_len=scale_len,
        bias=bias,
        deterministic=deterministic,
        tail=tail,
    )
    alpha = scale_of(q) if alpha is None else alpha
    OP.show(q=q, k=k, layout=layout, mask=mask, alpha=alpha, scale_len=scale_len, bias=bias)
    run = OP.select(facts, backend).run
    return run(
        q,
        k,
        v,
        layout,
        mask,
        alpha=alpha,
        scale_len=scale_len,
        bias=bias,
        deterministic=facts.deterministic,
        room=room,
        tail=tail,
    )


def _facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
    scale_len: float,
    bias: RelativeBias | None = None,
    deterministic: bool | None = None,
    room: GradientRoom | None = None,
    tail: int | None = None,
) -> AttentionFacts:
    """The one validator of all backends, and what is left to know once the arguments are sound."""
    check_attention(q, k, v, layout, mask)
    check_number("scale_len", scale_len, positive=True)
    if tail is not None and tail < 0:
        raise ValueError(f"tail must be >= 0, got {tail}")
    if alpha is not None:
        check_number("alpha", alpha)
    if bias is not None:
        check_bias(bias, q)
    return attention_facts(q, k, v, mask, bias, deterministic)


OP = Op("hstu_attention", __name__, backends=("sm90", "triton", "reference"), facts=_facts)
