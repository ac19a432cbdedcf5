"""The Hopper backend of `top_k`: that of Triton with a product scheduled by hand.

This module itself needs no Triton. The kernel is written in Gluon, a part of Triton that changes from one
version to the next.
"""

from __future__ import annotations

from torch import Tensor

from recsys import environment
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support
from recsys.ops.top_k import TopK, TopKFacts, triton

_LAUNCH = f"{__name__.rpartition('.')[0]}.sm90_launch"

if (environment.installed_version("triton") or "").startswith(f"{triton_support.GLUON}."):
    triton_support.preload(_LAUNCH)


def supports(facts: TopKFacts) -> Support:
    """What the Triton backend can do, on a Hopper GPU."""
    able = triton.supports(facts)
    if facts.device != "cuda":
        return able._replace(ok=False, reason=able.reason or "it needs CUDA tensors", auto=False)
    missing = triton_support.missing_for_hopper() if able.ok else ""
    return able._replace(ok=False, reason=missing) if missing else able


def run(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopK:
    """`top_k`; the arguments have been validated."""
    return triton_support.load(_LAUNCH).run(queries, items, k, removed, removed_lengths)
