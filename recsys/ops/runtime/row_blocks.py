"""Blocks of whole rows for kernels that process them one by one, and rows as these kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recsys.ops.runtime.triton_support import block_width


class RowBlocks(NamedTuple):
    """Block sizes of a kernel."""

    rows: int  # BLOCK_M, rows per block
    columns: int  # BLOCK, columns per block, at least those of a row
    num_warps: int


def row_blocks(width: int, entries: int, entries_per_warp: int, least_warps: int) -> RowBlocks:
    """Chooses blocks of about `entries` entries, or of a single row that has more."""
    columns = block_width(width)
    rows = max(1, entries // columns)
    return RowBlocks(rows, columns, max(least_warps, rows * columns // entries_per_warp))


def with_dense_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor with a last stride of 1 and a nonzero row stride, as kernels require."""
    return tensor if tensor.stride(1) == 1 and tensor.stride(0) != 0 else tensor.contiguous()
