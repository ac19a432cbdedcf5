"""Implements `gather_rows` in plain PyTorch: the definition of correct, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recsys.ops.runtime.dispatch import is_exporting


def run(
    values: Sequence[Tensor], index: Sequence[Tensor], inverse: Tensor | None, *, complete: bool = False
) -> Tensor:
    """Run `recsys.ops.gather_rows` on validated arguments."""
    rows = values[0] if len(values) == 1 else torch.cat(list(values))
    if len(index) == 1:
        return gather_rows(rows, index[0], inverse, complete=complete)
    joined = torch.cat(list(index))
    if is_exporting():
        return _take_within(rows, joined, complete)
    return _GatherRows.apply(rows, joined, inverse, [rows_of_index.shape[0] for rows_of_index in index])


def gather_rows(values: Tensor, index: Tensor, inverse: Tensor | None, *, complete: bool = False) -> Tensor:
    """Run `gather_rows` with a single map."""
    if is_exporting():  # an exported graph needs no gradient
        return _take_within(values, index, complete)
    return _GatherRows.apply(values, index, inverse, None)


def invert(index: Tensor, num_rows: int) -> Tensor:
    """Return int64 [num_rows]: the position of each row in `index`, -1 for rows that it leaves out."""
    place = torch.arange(index.shape[0], device=index.device)
    # The extra last entry takes what index == -1 writes.
    inverse = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=index.device)
    return inverse.scatter(0, torch.where(index < 0, num_rows, index.to(torch.int64)), place)[:num_rows]


def invert_each(index: Tensor, sizes: Sequence[int], num_rows: int) -> Tensor:
    """Return int64 [K, num_rows]: the position of each row in the K maps that are concatenated in `index`;
    positions count over all maps."""
    if len(sizes) == 1:
        return invert(index, num_rows)[None]
    inverses, before = [], 0
    for part in index.split(list(sizes)):
        inverse = invert(part, num_rows)
        inverses.append(torch.where(inverse < 0, inverse, inverse + before))
        before += part.shape[0]
    return torch.stack(inverses)


class _GatherRows(torch.autograd.Function):
    """Autograd function, called as `apply(values, index, inverse, sizes)`; `sizes` of the maps in `index`,
    None for one map."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, inverse: Tensor | None, sizes: list[int] | None
    ) -> Tensor:
        ctx.num_rows, ctx.sizes = values.shape[0], sizes
        ctx.save_for_backward(index, inverse)
        return _take(values, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse = ctx.saved_tensors
        if inverse is None:
            sizes = [index.shape[0]] if ctx.sizes is None else ctx.sizes
            inverse = invert_each(index, sizes, ctx.num_rows)
            if index.device.type == "cpu" and not torch.compiler.is_compiling():
                _check_injective(index, inverse)
        if inverse.dim() == 1:
            return _take(grad, inverse), None, None, None
        if inverse.shape[0] == 1:
            return _take(grad, inverse[0]), None, None, None
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        total = sum(_take(grad, places).to(wide) for places in inverse)
        return total.to(grad.dtype), None, None, None


def _take(values: Tensor, index: Tensor) -> Tensor:
    on_host = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bool((index >= 0).all()):
        return values.index_select(0, index)
    return _with_zeros(values).index_select(0, torch.where(index < 0, values.shape[0], index))


def _take_within(values: Tensor, index: Tensor, complete: bool) -> Tensor:
    """Take rows in a graph for a package, which reads no memory outside of `values` whatever the index says:
    AOTInductor runs the kernels that it compiles for a GPU on made-up numbers."""
    if complete:
        return values.index_select(0, index.clamp(0, values.shape[0] - 1))
    place = torch.where(index < 0, values.shape[0], index).clamp(max=values.shape[0])
    return _with_zeros(values).index_select(0, place)


def _with_zeros(values: Tensor) -> Tensor:
    """Append a row of zeros, which serves -1. (Gathering row 0 and multiplying by 0 would spread a NaN.)"""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def _check_injective(index: Tensor, inverse: Tensor) -> None:
    named, kept = int((index >= 0).sum()), int((inverse >= 0).sum())
    if named != kept:
        raise ValueError(
            f"index names {named - kept} rows more than once; gather_rows needs each row at most once"
        )
