"""HSTU attention in plain PyTorch: the definition of correct, on any device, float64 included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.dispatch import SUPPORTED, Support
from recsys.ops.layout import SequenceLayout
from recsys.ops.mask import AttentionMask, dense_mask_of
from recsys.ops.padding import padded_chunks
from recsys.ops.relative_bias import RelativeBias, dense_bias, relative_positions


def supports(facts: AttentionFacts) -> Support:
    """Everything."""
    return SUPPORTED


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask,
    *,
    alpha: float,
    scale_len: float,
    bias: RelativeBias | None,
) -> Tensor:
    """Chunk by chunk: scores [H, b, L, L] of b padded samples, SiLU, mask, times v."""
    padded = padded_chunks(layout, num_heads=q.shape[1])
    # Padding rows of q, k and v are zero: a padded key adds silu(..) * 0, a padded query is dropped by
    # `merge`.
    parts = zip(padded.chunks, *(padded.split(tensor) for tensor in (q * alpha, k, v)), strict=True)
    times = None
    if bias is not None:
        times = list(zip(padded.split(bias.timestamps), padded.split(bias.next_timestamps), strict=True))
    outputs = []
    for number, (chunk, q_bLHD, k_bLHD, v_bLHV) in enumerate(parts):
        scores_HbLL = q_bLHD.permute(2, 0, 1, 3) @ k_bLHD.permute(2, 0, 3, 1)
        if bias is not None and times is not None:
            position = torch.arange(chunk.max_len, device=q.device)
            relative = relative_positions(position, chunk.history_end[:, None], mask.target_group_size)
            scores_HbLL = scores_HbLL + dense_bias(bias, relative, *times[number]).to(scores_HbLL.dtype)
        visible = dense_mask_of(mask, chunk.lengths, chunk.history_end, layout.num_contextual, chunk.max_len)
        weights_HbLL = F.silu(scores_HbLL).masked_fill(~visible, 0.0)
        outputs.append((weights_HbLL @ v_bLHV.permute(2, 0, 1, 3)).permute(1, 2, 0, 3))
    return padded.merge(outputs) / scale_len
