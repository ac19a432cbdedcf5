"""Implements HSTU attention in plain PyTorch: the definition of correct, on any device and in any float
dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.jagged.mask import visible_pairs
from recsys.ops.jagged.padding import padded_chunks
from recsys.ops.relative_bias import dense_bias, relative_positions
from recsys.ops.runtime.dispatch import SUPPORTED, Support


def supports(facts: AttentionFacts) -> Support:
    """Supports everything but deterministic table gradients on CUDA, where PyTorch adds with atomics unless
    `torch.use_deterministic_algorithms(True)` is set."""
    atomics = facts.device == "cuda" and not torch.are_deterministic_algorithms_enabled()
    if facts.deterministic and facts.has_bias and facts.needs_grad and atomics:
        return Support(False, "on CUDA it needs torch.use_deterministic_algorithms(True) to be deterministic")
    return SUPPORTED


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Computes attention chunk by chunk: pads b samples, makes scores [H, b, L, L], adds bias and mask,
    applies SiLU and multiplies with v.

    There is only one way to compute; `supports` decides whether it counts as `deterministic`.
    """
    layout, mask, bias = problem.layout, problem.mask, problem.bias
    padded = padded_chunks(layout, mask, num_heads=q.shape[1])
    tensors = [q * problem.alpha, k, v] + ([] if bias is None else [bias.timestamps, bias.next_timestamps])
    outputs = []
    # Padding rows of q, k and v are zero: a padded key adds silu(..) * 0, and `merge` drops padded queries.
    for chunk, q_bLHD, k_bLHD, v_bLHV, *times in zip(padded.chunks, *map(padded.split, tensors), strict=True):
        scores_HbLL = q_bLHD.permute(2, 0, 1, 3) @ k_bLHD.permute(2, 0, 3, 1)
        visible = visible_pairs(mask, chunk.history_end, layout.num_contextual, chunk.max_len)
        # With an offset this negative SiLU and its derivative are exactly 0. Adding it costs less than
        # masking both.
        offset = torch.zeros_like(visible, dtype=scores_HbLL.dtype)
        offset.masked_fill_(~visible, torch.finfo(offset.dtype).min / 4)
        if bias is not None:
            position = torch.arange(chunk.max_len, device=q.device)
            relative = relative_positions(position, chunk.history_end[:, None], mask.target_group_size)
            timestamps, next_timestamps = times
            offset = dense_bias(bias, relative, relative, next_timestamps, timestamps).to(offset) + offset
        weights_HbLL = F.silu(scores_HbLL.add_(offset))
        outputs.append((weights_HbLL @ v_bLHV.permute(2, 0, 1, 3)).permute(1, 2, 0, 3))
    return padded.merge(outputs) / problem.scale_len
