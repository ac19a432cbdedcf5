"""Row movement and pooling on jagged tensors.

`gather_rows` carries out every index that `SequenceLayout` hands out (truncate, assemble, split, pad): one
map forward, its inverse backward, no atomics. `segment_sum` pools the values of multi-valued features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.jagged import reference

__all__ = ["gather_rows", "segment_sum"]


def gather_rows(values: Tensor, index: Tensor, inverse: Tensor | None = None) -> Tensor:
    """`out[n] = values[index[n]]`, or a row of zeros where `index[n] == -1`. Differentiable in `values`.

    The index must not name a row twice; so the gradient is a gather too, exact and in a fixed order:
    `grad_values[t] = grad_out[n]` for the `n` with `index[n] == t`, zero where there is none.

    Args:
        values: [T, ...], any dtype.
        index: int64 [N], each in [-1, T).
        inverse: int64 [T], where `out` holds each row of `values`, -1 for nowhere; saves computing it in
            backward.

    Returns:
        [N, ...], dtype of `values`.

    Raises:
        TypeError, ValueError: naming the argument. A row that is named twice raises in backward, on a CPU.
    """
    if index.dtype != torch.int64:
        raise TypeError(f"index must be int64, got {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"index must have one dimension, got shape {tuple(index.shape)}")
    if values.dim() == 0:
        raise ValueError("values must have at least one dimension")
    if index.device != values.device:
        raise ValueError(f"index is on {index.device}, values on {values.device}")
    return reference.gather_rows(values, index, inverse)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """`out[b]` = sum of the `lengths[b]` rows of `values` that belong to segment b; zeros for an empty
    segment.

    Args:
        values: [N, ...], floating point; segments one after the other.
        lengths: int32 or int64 [B], adding up to N.

    Returns:
        [B, ...], dtype of `values`. Differentiable in `values`.

    Raises:
        TypeError, ValueError: naming the argument; a wrong sum of lengths only where they are on the host.
    """
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
    return reference.segment_sum(values, lengths)
