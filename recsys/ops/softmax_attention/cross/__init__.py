"""Defines `cross_attention`: softmax attention of jagged samples to jagged keys, without a mask."""

from __future__ import annotations

from torch import Tensor

from recsys.ops.attention_args import attention_facts, check_attention, fits_flash, scale_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.dispatch import Op

__all__ = ["OP", "cross_attention"]

_NO_WINDOW = AttentionMask()


def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    *,
    backend: str = "auto",
) -> Tensor:
    """Computes, per head, `out[i] = sum_j softmax_j(<q_i, k_j> / sqrt(D)) v_j` over all keys of i's sample.

    With `key_layout` the same object as `layout`, all tokens of a sample attend to each other.

    Args:
        q: [T, H, D] floating point; `T == layout.total_len`.
        k: [S, H, D], dtype and device of q; `S == key_layout.total_len`.
        v: [S, H, V]; V may differ from D.
        layout: the samples of the queries.
        key_layout: the samples of the keys, as many as those of `layout`.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, H, V], zeros for a sample without keys. Differentiable in q, k and v.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Vaswani et al., Attention Is All You Need.
    """
    check_attention(q, q, q, layout, _NO_WINDOW)
    _check_keys(q, k, v, layout, key_layout)
    if layout.total_targets or key_layout.total_targets:
        raise ValueError("samples must hold no targets, which would see each other")
    # Without a mask, contextual tokens are like others.
    facts = attention_facts(q, k, v, _NO_WINDOW, None, None, fits_flash(layout))
    return OP.select(facts, backend).run(q, k, v, layout, key_layout, alpha=scale_of(q))


def _check_keys(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, key_layout: SequenceLayout) -> None:
    if not isinstance(key_layout, SequenceLayout):
        raise TypeError(f"key_layout must be a SequenceLayout, got {type(key_layout).__name__}")
    if key_layout.batch_size != layout.batch_size:
        raise ValueError(f"key_layout has {key_layout.batch_size} samples, layout {layout.batch_size}")
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dtype != q.dtype:
            actual = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of the dtype of q, {q.dtype}, got {actual}")
        if tensor.device != q.device or key_layout.device != q.device:
            raise ValueError(
                f"{name} is on {tensor.device}, key_layout on {key_layout.device}, q on {q.device}"
            )
        if tensor.dim() != 3 or tensor.shape[1] != q.shape[1] or tensor.shape[2] == 0:
            wanted = f"[keys, {q.shape[1]}, at least 1]"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
        if tensor.shape[0] != key_layout.total_len:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, the key_layout total_len = {key_layout.total_len}"
            )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have the head dimension of q, {q.shape[2]}, got {k.shape[2]}")


OP = Op("cross_attention", __name__, backends=("flash", "reference"))
