"""Defines `softmax_attention`: transformer attention over jagged samples, masked like `hstu_attention`."""

from __future__ import annotations

from torch import Tensor

from recsys.ops.attention_args import attention_facts, check_attention, fits_flash, scale_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.arguments import check_number
from recsys.ops.runtime.dispatch import Op

__all__ = ["OP", "softmax_attention"]

_CAUSAL = AttentionMask()


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute, per head, `out[i] = sum_j softmax_j(alpha <q_i, k_j>) v_j` over the keys `j` that `i` sees.

    Args:
        q: [T, H, D] floating point; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V]; V may differ from D.
        mask: who sees whom within a sample. A token always sees itself, so no row is empty.
        alpha: None for `1 / sqrt(D)`; an explicit 0.0 means 0.0.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, H, V]. Differentiable in q, k and v.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Vaswani et al., Attention Is All You Need; Kang and McAuley, SASRec, arXiv 1808.09781.
    """
    check_attention(q, k, v, layout, mask)
    if alpha is not None:
        check_number("alpha", alpha)
    histories_only = fits_flash(layout) and not layout.num_contextual and not layout.total_targets
    chosen = OP.select(attention_facts(q, k, v, mask, None, None, histories_only), backend)
    alpha = scale_of(q) if alpha is None else alpha
    OP.show(q=q, k=k, layout=layout, mask=mask, alpha=alpha)
    return chosen.run(q, k, v, layout, mask, alpha=alpha)


OP = Op("softmax_attention", __name__, backends=("flash", "reference"))
