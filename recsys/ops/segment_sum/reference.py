"""Plain PyTorch for `segment_sum`: the definition of correct, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.runtime.dispatch import SUPPORTED, Support


def supports(facts: object) -> Support:
    """Everything."""
    return SUPPORTED


def run(values: Tensor, lengths: Tensor) -> Tensor:
    """See `recsys.ops.segment_sum`; the arguments have been validated."""
    wide = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    total = wide.new_zeros(lengths.shape[0], *values.shape[1:])
    return total.index_add(0, segment_ids(lengths, values.shape[0]), wide).to(values.dtype)


def segment_ids(lengths: Tensor, num_rows: int) -> Tensor:
    """int64 [num_rows], the segment of each row."""
    segments = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(segments, lengths, output_size=num_rows)
