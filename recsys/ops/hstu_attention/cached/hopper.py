"""Hopper backend of `hstu_attention_cached`, only for candidates on cached histories.

This module itself needs no Triton: kernel and launch are in `hopper_kernel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention import hopper
from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

WIDTHS = (64, 128)
"""Head widths, in columns, for which `hopper_kernel` has sizes."""

ENOUGH = 96
"""Tiles times heads from which on a call keeps a GPU busy; with fewer, the Triton backend, which sums in
parts, is as fast."""

_OPS = f"{__name__.rpartition('.')[0]}.hopper_kernel"

triton_support.preload_gluon(_OPS)


def supports(facts: AttentionFacts) -> Support:
    """Supports what the Hopper backend for whole samples does, if all new tokens are targets without a
    window."""
    able = hopper.supports(facts)
    if not able.ok:
        return able
    missing = ""
    if facts.qk_dim not in WIDTHS:
        missing = f"it takes heads of {WIDTHS}, not {facts.qk_dim}"
    elif torch.compiler.is_compiling():
        missing = "a graph does not know of which kind new tokens are"
    elif not facts.only_targets:
        missing = "it takes new tokens that are all targets, here there is history among them"
    elif facts.mask.target_window:
        missing = "it has no window of targets"
    if missing:
        return able._replace(ok=False, reason=missing, auto=False)
    return able._replace(auto=able.auto and facts.num_units >= ENOUGH)


def run(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, problem: CachedProblem) -> Tensor:
    """Runs the kernel: scores and sums are float32, weights are rounded to the dtype of v."""
    return triton_support.load(_OPS).forward(q, k, v, cache_k, cache_v, problem)
