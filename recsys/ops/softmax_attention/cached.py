"""Defines `softmax_attention_cached`: `softmax_attention` for new tokens, with the keys and values of earlier
tokens cached. It is plain PyTorch, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.attention_args import check_attention, check_cache, scale_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask, row_intervals
from recsys.ops.jagged.padding import paired_chunks

_CAUSAL = AttentionMask()


def softmax_attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
) -> Tensor:
    """Computes the new rows of `softmax_attention` over `[contextual | cached uih | new uih | targets]`.

    Each sample of `layout` continues the same sample of `cache_layout`. When a cache of a stack of layers is
    right is said in `hstu_attention_cached`.

    Args:
        q: [T, H, D] floating point, of the new tokens; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V]; V may differ from D.
        layout: the new tokens of each sample: uih, then targets. No contextual tokens.
        cache_k: [T_cache, H, D], `T_cache == cache_layout.total_len`.
        cache_v: [T_cache, H, V].
        cache_layout: the cached tokens: contextual tokens and uih, no targets; same `batch_size` as `layout`.
        mask: who sees whom within the whole sample.
        alpha: None for `1 / sqrt(D)`.

    Returns:
        [T, H, V]. Not differentiable.

    Raises:
        TypeError, ValueError: naming the argument. RuntimeError if gradients are enabled.
    """
    check_attention(q, k, v, layout, mask)
    check_cache(q, v, layout, cache_k, cache_v, cache_layout)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v, cache_k, cache_v)):
        raise RuntimeError("softmax_attention_cached computes no gradients; call it under torch.no_grad()")
    alpha = scale_of(q) if alpha is None else alpha
    new, cached = paired_chunks(layout, cache_layout, num_heads=q.shape[1])
    chunks = zip(
        new.chunks,
        cached.chunks,
        *(new.split(tensor) for tensor in (q * alpha, k, v)),
        *(cached.split(tensor) for tensor in (cache_k, cache_v)),
        new.are_tokens(),
        cached.are_tokens(),
        strict=True,
    )
    outputs = []
    for chunk, cache_chunk, q_bQHD, k_bQHD, v_bQHV, cache_k_bKHD, cache_v_bKHV, is_new, is_cached in chunks:
        num_cached = cache_chunk.history_end[:, None]
        row = num_cached + torch.arange(chunk.max_len, device=q.device)
        seen = row_intervals(mask, row, num_cached + chunk.history_end[:, None], cache_layout.num_contextual)
        column = torch.arange(cache_chunk.max_len, device=q.device).expand(num_cached.shape[0], -1)
        visible = torch.cat(
            [seen.contain(column) & is_cached[:, None], seen.contain(row) & is_new[:, None]], dim=2
        )
        keys, values = torch.cat([cache_k_bKHD, k_bQHD], 1), torch.cat([cache_v_bKHV, v_bQHV], 1)
        heads = (tensor.transpose(1, 2) for tensor in (q_bQHD, keys, values))
        # Padding rows see nothing and are NaN, but they are dropped.
        out_bHQV = F.scaled_dot_product_attention(*heads, attn_mask=visible[:, None], scale=1.0)
        outputs.append(out_bHQV.transpose(1, 2))
    return new.merge(outputs)
