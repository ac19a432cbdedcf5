"""Plain PyTorch for `gather_rows` and `segment_sum`: the definition of correct, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gather_rows(values: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
    """See `recsys.ops.jagged.gather_rows`."""
    if torch.compiler.is_exporting():  # an exported graph needs no gradient
        return _take(values, index)
    return _GatherRows.apply(values, index, inverse)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """See `recsys.ops.jagged.segment_sum`."""
    num_segments = lengths.shape[0]
    segment = torch.repeat_interleave(
        torch.arange(num_segments, device=values.device), lengths, output_size=values.shape[0]
    )
    return values.new_zeros(num_segments, *values.shape[1:]).index_add(0, segment, values)


def invert(index: Tensor, num_rows: int) -> Tensor:
    """int64 [num_rows]: the place of each row in `index`, -1 for rows that it leaves out."""
    place = torch.arange(index.shape[0], device=index.device)
    inverse = index.new_full((num_rows + 1,), -1)  # the last entry takes what index == -1 writes
    return inverse.scatter(0, torch.where(index < 0, num_rows, index), place)[:num_rows]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
        ctx.num_rows = values.shape[0]
        ctx.save_for_backward(index, inverse)
        return _take(values, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        if inverse is None:
            inverse = invert(index, ctx.num_rows)
            if index.device.type == "cpu" and not torch.compiler.is_compiling():
                _check_injective(index, inverse)
        return _take(grad, inverse), None, None


def _take(values: Tensor, index: Tensor) -> Tensor:
    on_host = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bool((index >= 0).all()):
        return values.index_select(0, index)
    # A row of zeros behind the last one serves -1. (Gathering row 0 and multiplying by 0 would spread a NaN.)
    with_zeros = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return with_zeros.index_select(0, torch.where(index < 0, values.shape[0], index))


def _check_injective(index: Tensor, inverse: Tensor) -> None:
    named, kept = int((index >= 0).sum()), int((inverse >= 0).sum())
    if named != kept:
        raise ValueError(
            f"index names {named - kept} rows more than once; gather_rows needs each row at most once"
        )
