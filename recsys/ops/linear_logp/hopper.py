"""The Hopper backend of `linear_logp`: hand-scheduled kernels, for the loss over a catalog.

This module itself needs no Triton. The kernels are in `hopper_kernels` and `hopper_wide`, their launches in
`hopper_ops`. They are written in Gluon, a part of Triton that changes between versions.
"""

from __future__ import annotations

import torch

from recsys.ops.linear_logp import LogpFacts
from recsys.ops.linear_logp.recompute import Backend
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_WIDTH = 512
"""Widest rows, in columns, for which `hopper_ops` has block sizes."""

LEAST_WEIGHT = 1 << 24
"""Entries of the weight (items x columns) from which on "auto" takes this backend.

Speedup over the Triton backend in wall-clock time, forward and backward, unit vectors, on one H200: 0.82 to
0.91 with up to 100,000 x 64 entries, where the host limits a call (1.27 to 1.36 in GPU time alone); 1.71 with
100,000 x 256, 1.86 with 100,000 x 512, 1.94 with 1,000,000 x 128. Without normalization: 1.06 to 1.19
(experiments/2026-11-23-fewer-forms).
"""

_OPS = f"{__name__.rpartition('.')[0]}.hopper_ops"

triton_support.preload_gluon(_OPS)


def supports(facts: LogpFacts) -> Support:
    """Supports 16-bit operands without bias and ids on a Hopper GPU; "auto" also requires `LEAST_WEIGHT`.

    Each pass copies rows that have to be normalized or whose size in bytes is no multiple of 16. Normalized
    rows are rounded once more than in the Triton backend.
    """
    able = triton_support.hopper_support(facts.device, facts.dtype)
    if facts.weight_size < LEAST_WEIGHT:
        able = able._replace(auto=False)
    missing = _missing_from_the_call(facts) if able.ok else ""
    return able._replace(ok=False, reason=missing) if missing else able


def _missing_from_the_call(facts: LogpFacts) -> str:
    for present, what in (
        (facts.has_bias, "it adds no bias"),
        (facts.has_ids, "it compares no ids"),
        (facts.dtype.itemsize != 2, f"it takes bfloat16 and float16, not {facts.dtype}"),
        (facts.width > MAX_WIDTH, f"hidden has {facts.width} columns, it takes up to {MAX_WIDTH}"),
        (torch.compiler.is_compiling(), "a graph cannot hold it"),
    ):
        if present:
            return what
    return ""


def backend() -> Backend:
    """Returns the loops over scores; traced graphs hold the Triton kernels."""
    return triton_support.load(_OPS).BACKEND
