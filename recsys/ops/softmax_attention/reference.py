"""Implement softmax attention in plain PyTorch: the definition of correct, on any device and in any float
dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask, visible_pairs
from recsys.ops.jagged.padding import padded_chunks


def run(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask, *, alpha: float
) -> Tensor:
    """Run `scaled_dot_product_attention` on padded samples, chunk by chunk."""
    padded = padded_chunks(layout, mask, num_heads=q.shape[1])
    parts = zip(padded.chunks, *(padded.split(tensor) for tensor in (q * alpha, k, v)), strict=True)
    outputs = []
    for chunk, q_bLHD, k_bLHD, v_bLHV in parts:
        # Padding rows see themselves. A row without keys is NaN, and so are its gradients, even if its output
        # is dropped.
        visible = visible_pairs(mask, chunk.history_end, layout.num_contextual, chunk.max_len)
        heads = (tensor.transpose(1, 2) for tensor in (q_bLHD, k_bLHD, v_bLHV))
        out_bHLV = F.scaled_dot_product_attention(*heads, attn_mask=visible[:, None], scale=1.0)
        outputs.append(out_bHLV.transpose(1, 2))
    return padded.merge(outputs)
