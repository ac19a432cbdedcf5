"""Implements the reference of `bucket_embedding` in plain PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def run(x: Tensor, tables: Sequence[Tensor], buckets: Sequence[Tensor], scale: float) -> Tensor:
    """Runs `recsys.ops.bucket_embedding`; the arguments have been validated."""
    out = x if scale == 1 else x * scale
    for table, rows in zip(tables, buckets, strict=True):
        out = out + F.embedding(rows, table)
    return out
