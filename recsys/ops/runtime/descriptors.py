"""Ragged tensor descriptors: boxes of rows of one head of a tensor [T, H, D], cut off at the end of a sample.

A box at coordinates (2^30, end of the sample, 2^30 - length of the sample + row, column) holds the rows of
the sample from `row` on. The third dimension has size 2^30, so rows past the sample are out of bounds: they
are read as zeros and not written. The first coordinate leads back to the sample: its 2^30 steps equal -2^30
rows modulo 2^64 bytes, which cancels the 2^30 of the third coordinate. Source: `triton.tools.ragged_tma`.

This module needs Triton; `gluon_descriptor` needs its Gluon.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

RAGGED_ROWS = 2**30
"""Rows that a ragged descriptor claims to have; no batch has as many tokens."""

ANY_ROWS = 0x7FFF0000
"""Size that exceeds every coordinate and that a tensor map may have."""

STEP_BACK = 2**34
"""Elements by which the first stride exceeds minus one row. 2^30 times this is 0 modulo 2^64 bytes, so
2^30 steps of the first coordinate lead back by 2^30 rows."""

ALIGNMENT = 16
"""Number of bytes by which the addresses and strides of a tensor map are divisible."""


class Boxes(NamedTuple):
    """A tensor [T, H, D] and the size of the boxes into which a ragged descriptor divides it."""

    tensor: Tensor
    rows: int
    columns: int


class RaggedShape(NamedTuple):
    """Shape and strides of a ragged descriptor, and whether a tensor map can describe the tensor at all."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    both: tuple[int, ...]  # the shape, then the strides
    loadable: bool


@lru_cache(maxsize=1024)
def ragged_shape(stride: tuple[int, int, int], num_heads: int, dim: int, size: int) -> RaggedShape:
    """Returns the descriptor's shape for a tensor [T, num_heads, dim] of `size` bytes per element; it is the
    same for every T.

    `loadable`: rows and heads start at multiples of 16 bytes, and heads lie side by side within a row.
    """
    row, head, last = stride
    width = (num_heads - 1) * head + dim
    aligned = row * size % ALIGNMENT == 0 and head * size % ALIGNMENT == 0
    shape, strides = (ANY_ROWS, ANY_ROWS, RAGGED_ROWS, width), (STEP_BACK - row, row, row, 1)
    return RaggedShape(shape, strides, shape + strides, last == 1 and aligned and head >= 0 and width <= row)


def shape_of(tensor: Tensor) -> RaggedShape:
    """Returns `ragged_shape` for a tensor [T, H, D]."""
    return ragged_shape(tensor.stride(), tensor.size(1), tensor.size(2), tensor.element_size())


def is_loadable(tensor: Tensor) -> bool:
    """Returns True if a ragged descriptor can describe a tensor [T, H, D] without a copy."""
    return shape_of(tensor).loadable and tensor.data_ptr() % ALIGNMENT == 0


def with_loadable_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor [T, H, D] if a ragged descriptor can describe it, otherwise a copy."""
    if is_loadable(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # contiguous() would keep an unaligned address


def ragged_descriptor(boxes: Boxes) -> TensorDescriptor:
    """Creates the descriptor for a kernel in Triton's language."""
    shape, strides, _, _ = shape_of(boxes.tensor)
    return TensorDescriptor(boxes.tensor, list(shape), list(strides), [1, 1, boxes.rows, boxes.columns])


def gluon_descriptor(boxes: Boxes) -> TensorDescriptor:
    """Creates the descriptor for a kernel in Gluon, including the layout in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia import hopper

    shape, strides, _, _ = shape_of(boxes.tensor)
    bits = 8 * boxes.tensor.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4)
    box = [1, 1, boxes.rows, boxes.columns]
    return hopper.TensorDescriptor(boxes.tensor, list(shape), list(strides), box, layout)
