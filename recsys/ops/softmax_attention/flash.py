"""Implements softmax attention by PyTorch's FlashAttention for jagged samples, `varlen_attn`: on a GPU,
without padding, for samples whose mask is causal."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from recsys.ops.attention_args import MAX_SAMPLES, AttentionFacts
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.dispatch import SUPPORTED, Support

MAX_WIDTH = 256
"""The most columns that a head may have."""

MULTIPLE = 8
"""The kernels take heads whose width is a multiple of this."""


def supports(facts: AttentionFacts) -> Support:
    """Supports histories without contextual tokens and targets, in 16 bits."""
    width = max(facts.qk_dim, facts.v_dim)
    if facts.device != "cuda":
        return _no(f"it needs CUDA tensors, these are on {facts.device}")
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return _no(f"it takes bfloat16 and float16, not {facts.dtype}")
    if facts.needs_grad and facts.deterministic:
        return _no("its backward pass adds in any order, and results must be the same bits each time")
    if not facts.histories_only:
        samples = f"up to {MAX_SAMPLES} samples without contextual tokens and targets"
        return _no(f"it takes {samples}, outside traced graphs")
    if facts.mask.window is not None and facts.mask.prefix:
        return _no("it has no prefix outside the window")
    if width > MAX_WIDTH:
        return _no(f"a head has {width} columns, it takes up to {MAX_WIDTH}")
    if not _has_kernels():
        return _no("it needs a GPU of compute capability 8.0 and a PyTorch built with FlashAttention")
    return SUPPORTED


def run(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask, *, alpha: float
) -> Tensor:
    """Runs the kernels once for all samples; heads are widened by zeros to a width that they take."""
    if not layout.total_len:
        return v + 0 * (q + k).sum(2, keepdim=True)  # the kernels take no empty batch
    window = (-1 if mask.window is None else mask.window - 1, 0)
    return attend(q, k, v, layout, layout, alpha=alpha, window=window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    key_layout: SequenceLayout,
    *,
    alpha: float,
    window: tuple[int, int],
) -> Tensor:
    """Runs the kernels for samples of queries, of which there are some, and of keys.

    Args:
        window: the most keys before and after a query's own place that it sees; -1 for no limit.
    """
    v_dim = v.shape[2]
    if alpha <= 0:
        q, alpha = q * alpha, 1.0  # the kernels scale hidden scores, -inf, too
    width = -(-max(q.shape[2], v_dim) // MULTIPLE) * MULTIPLE
    q, k, v = (_widened(tensor, width) for tensor in (q, k, v))
    offsets = (
        part.memo("int32 offsets", lambda part=part: part.offsets.to(torch.int32))
        for part in (layout, key_layout)
    )
    lens = layout.max_len, key_layout.max_len
    out = varlen_attn(q, k, v, *offsets, *lens, scale=alpha, window_size=window)
    return out[..., :v_dim]


def _widened(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[2]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _no(reason: str) -> Support:
    """Most calls outside training on a GPU are not for these kernels, so "auto" skips them silently."""
    return Support(False, reason, auto=False)


@lru_cache(maxsize=1)
def _has_kernels() -> bool:
    if not torch.cuda.is_available() or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
