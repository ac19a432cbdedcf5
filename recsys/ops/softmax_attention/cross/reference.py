"""Implements cross attention in plain PyTorch: the definition of correct, on any device and in any float
dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.padding import PaddedChunks, paired_chunks


def run(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, key_layout: SequenceLayout, *, alpha: float
) -> Tensor:
    """Runs `scaled_dot_product_attention` on padded samples, chunk by chunk."""
    padded, padded_keys = _chunks(layout, key_layout, q.shape[1])
    parts = zip(padded_keys.chunks, padded.split(q), padded_keys.split(k), padded_keys.split(v), strict=True)
    outputs = []
    for chunk, q_bQHD, k_bKHD, v_bKHV in parts:
        # Without keys, one that is zeros gives zeros. A GPU may give NaN to a row that sees nothing.
        ends = chunk.history_end.clamp(min=1)[:, None]
        seen = torch.arange(chunk.max_len, device=q.device) < ends
        heads = (tensor.transpose(1, 2) for tensor in (q_bQHD, k_bKHD, v_bKHV))
        out_bHQV = F.scaled_dot_product_attention(*heads, attn_mask=seen[:, None, None], scale=alpha)
        outputs.append(out_bHQV.transpose(1, 2))
    return padded.merge(outputs)


def _chunks(
    layout: SequenceLayout, key_layout: SequenceLayout, num_heads: int
) -> tuple[PaddedChunks, PaddedChunks]:
    """Returns the chunks of queries and of keys, which all layers share."""
    # A layout that refers to itself would live until the garbage collector runs.
    key = ("cross attention", None if layout is key_layout else layout, num_heads)
    return key_layout.memo(key, lambda: paired_chunks(layout, key_layout, num_heads, new_are_keys=False))
