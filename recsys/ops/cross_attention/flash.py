"""Implements cross attention by PyTorch's FlashAttention for jagged samples: on a GPU, without padding.

Its kernels serve all sizes. `scaled_dot_product_attention`, for padded samples, takes cuDNN first on a Hopper
GPU, which builds a plan for every new shape, tens of milliseconds each, and every batch has new shapes.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from recsys.ops.cross_attention import CrossFacts
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.runtime.dispatch import Support
from recsys.ops.softmax_attention import flash

MAX_SAMPLES = 65_535
"""The most samples that a launch takes."""


def supports(facts: CrossFacts) -> Support:
    """Supports 16 bits outside traced graphs, as far as `softmax_attention`'s backend does."""
    if facts.num_samples > MAX_SAMPLES:
        reason = f"there are {facts.num_samples} samples, it takes up to {MAX_SAMPLES}"
        return Support(False, reason, auto=False)
    return flash.supports(replace(facts.attention, histories_only=not facts.traced))


def run(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, key_layout: SequenceLayout, *, alpha: float
) -> Tensor:
    """Runs the kernels once for all samples."""
    if not layout.total_len or not key_layout.total_len:
        return q.new_zeros(*q.shape[:2], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
    return flash.attend(q, k, v, layout, key_layout, alpha=alpha, window=(-1, -1))
