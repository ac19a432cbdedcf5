"""`segment_sum`: pools the rows of each segment of a jagged tensor, as for multi-valued features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops.runtime.dispatch import Op, is_exporting

__all__ = ["OP", "segment_sum"]


@dataclass(frozen=True)
class SegmentFacts:
    """All that a backend may know when it says whether it can run."""

    device: str
    dtype: torch.dtype
    exported: bool = False


def segment_sum(values: Tensor, lengths: Tensor, *, backend: str = "auto") -> Tensor:
    """`out[b]` = sum of the `lengths[b]` rows of `values` that belong to segment b; zeros for an empty
    segment. Differentiable in `values`.

    Args:
        values: [N, ...], floating point; segments one after the other.
        lengths: int32 or int64 [B], adding up to N.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [B, ...], dtype of `values`, summed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: naming the argument; a wrong sum of lengths only where they are on the host.
    """
    return OP.select(_facts(values, lengths), backend).run(values, lengths)


def _facts(values: Tensor, lengths: Tensor) -> SegmentFacts:
    """The one validator of all backends, and what is left to know once the arguments are sound."""
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths must have one dimension, got shape {tuple(lengths.shape)}")
    if values.dim() == 0 or not values.is_floating_point():
        raise TypeError(
            f"values must be floating point rows, got shape {tuple(values.shape)} of {values.dtype}"
        )
    if lengths.device != values.device:
        raise ValueError(f"lengths is on {lengths.device}, values on {values.device}")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        total = int(lengths.sum())
        if total != values.shape[0]:
            raise ValueError(f"lengths add up to {total}, but values has {values.shape[0]} rows")
    exported = is_exporting()
    return SegmentFacts(values.device.type, values.dtype, exported)


OP = Op("segment_sum", __name__, backends=("triton", "reference"), facts=_facts)
