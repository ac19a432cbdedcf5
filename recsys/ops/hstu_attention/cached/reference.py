"""Implements cached HSTU attention in plain PyTorch: the definition of correct, on any device and in any
float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.jagged.mask import row_intervals
from recsys.ops.jagged.padding import PaddedChunks, paired_chunks
from recsys.ops.relative_bias import dense_bias, relative_positions


def run(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem) -> Tensor:
    """Add what the new tokens of b padded samples get from cached keys to what they get from new keys, chunk
    by chunk.

    Without a softmax an output is a sum over keys, wherever they are stored. Positions are those in the whole
    sample: the new tokens stand behind the cached ones.
    """
    layout, cache_layout, mask, bias = problem.layout, problem.cache_layout, problem.mask, problem.bias
    new, cached = paired_chunks(layout, cache_layout, num_heads=q.shape[1])
    times = (None, None, None)
    if bias is not None:
        times = (bias.next_timestamps, bias.timestamps, bias.cache_timestamps)
    chunks = zip(
        new.chunks,
        cached.chunks,
        _split(new, q * problem.alpha, times[0]),
        _split(new, k, v, times[1]),
        _split(cached, cache_k, cache_v, times[2]),
        strict=True,
    )
    outputs = []
    for chunk, cache_chunk, (q_bQHD, next_timestamps), new_keys, cached_keys in chunks:
        num_cached = cache_chunk.history_end[:, None]
        history_end = num_cached + chunk.history_end[:, None]
        row = num_cached + torch.arange(chunk.max_len, device=q.device)
        column = torch.arange(cache_chunk.max_len, device=q.device).expand(num_cached.shape[0], -1)
        seen = row_intervals(mask, row, history_end, cache_layout.num_contextual)
        total = 0
        for key, (k_bKHD, v_bKHV, timestamps) in ((row, new_keys), (column, cached_keys)):
            # Padded keys and values are zero: such a key adds silu(..) * 0. Padded queries are dropped.
            scores_HbQK = q_bQHD.permute(2, 0, 1, 3) @ k_bKHD.permute(2, 0, 3, 1)
            if bias is not None:
                query_place, key_place = (
                    relative_positions(position, history_end, mask.target_group_size)
                    for position in (row, key)
                )
                added = dense_bias(bias, query_place, key_place, next_timestamps, timestamps)
                scores_HbQK += added.to(scores_HbQK.dtype)
            weights_HbQK = F.silu(scores_HbQK).masked_fill(~seen.contain(key), 0.0)
            total = total + weights_HbQK @ v_bKHV.permute(2, 0, 1, 3)
        outputs.append(total.permute(1, 2, 0, 3))
    return new.merge(outputs) / problem.scale_len


def _split(padded: PaddedChunks, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """Return one tuple per chunk, with each tensor padded and None for None."""
    columns = [[None] * len(padded.chunks) if tensor is None else padded.split(tensor) for tensor in tensors]
    return list(zip(*columns, strict=True))
