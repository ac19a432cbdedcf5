"""Implements cross attention by PyTorch's FlashAttention for jagged samples: on a GPU, without padding.

Its kernels serve all sizes. `scaled_dot_product_attention`, for padded samples, takes cuDNN first on a Hopper
GPU, which builds a plan for every new shape, tens of milliseconds each, and every batch has new shapes.
"""

from __future__ import annotations

from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.runtime.dispatch import Support
from recsys.ops.softmax_attention import flash


def supports(facts: AttentionFacts) -> Support:
    """Supports 16 bits outside traced graphs, as far as `softmax_attention`'s backend does."""
    return flash.supports(facts)


def run(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, key_layout: SequenceLayout, *, alpha: float
) -> Tensor:
    """Runs the kernels once for all samples."""
    if not layout.total_len or not key_layout.total_len:
        return q.new_zeros(*q.shape[:2], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
    return flash.attend(q, k, v, layout, key_layout, alpha=alpha, window=(-1, -1))
