"""Launches of the kernels of `segment_sum`; an autograd function in eager mode, library ops in graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.jagged.layout import offsets_from_lengths
from recsys.ops.jagged.triton_ops import dense_rows, is_zero, launch_gather, step_of, width_of
from recsys.ops.runtime.launch import Wrap, launch
from recsys.ops.runtime.registration import differentiable, traceable_op
from recsys.ops.segment_sum.reference import segment_ids
from recsys.ops.segment_sum.triton_kernels import pieces_kernel, shares_kernel

ENTRIES = 4096
"""Of a program's block, rows x columns, but at most `MOST_ROWS` rows."""

MOST_ROWS = 128

LONGEST_BLOCK = 256
"""Columns of a block; a longer row has several."""

SHARE_COLUMNS = 64
"""Columns of a block of the second kernel, whose programs have little to do but wait."""

SHORT = 8
"""Rows of a segment, on average; below this a program has several segments."""

SHORT_PIECE = 64
PIECES = 1024
"""Of long segments: about so many in all, which keeps both kernels short."""

SMALLEST_PIECE, TRACED_PIECE = 64, 256


class Segments(NamedTuple):
    """Rows by segment, K segments.

    Attributes:
        ids: [n], of each row, sorted; rows outside of [0, K) are in no sum.
        bounds: int64 [K + 1], first row of each segment, and the end.
        order: int64 [n], the row of the values that comes at each place; None: the values are in order.
    """

    ids: Tensor
    bounds: Tensor
    order: Tensor | None


class Cuts(NamedTuple):
    """How rows are cut up: rows of a chunk, segments of a program."""

    piece: int
    together: int


class SegmentSum(torch.autograd.Function):
    """`apply(values, lengths)`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        segments = consecutive(lengths, values.shape[0])
        ctx.save_for_backward(segments.ids)
        return launch_sums(values, segments, values.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return launch_gather([grad_out], ids), None


def consecutive(lengths: Tensor, num_rows: int) -> Segments:
    """Segments that lie one after the other."""
    return Segments(segment_ids(lengths, num_rows), offsets_from_lengths(lengths), None)


def launch_sums(values: Tensor, segments: Segments, dtype: torch.dtype, wrap: Wrap | None = None) -> Tensor:
    """[K, ...] of `dtype` from values [n, ...]; the arguments have been validated."""
    num_rows, num_segments = segments.ids.shape[0], segments.bounds.shape[0] - 1
    width = width_of(values)
    out = values.new_empty((num_segments, *values.shape[1:]), dtype=dtype)
    if is_zero(num_segments) or width == 0:
        return out
    rows = dense_rows(values, width)
    block = min(1 << (width - 1).bit_length(), LONGEST_BLOCK)
    cuts = cuts_of(num_rows, num_segments, block, ordered=segments.order is not None)
    whole = num_rows // cuts.piece  # chunks; at most one more is not
    partial = values.new_empty((2 * (whole + 1), width), dtype=torch.float32)
    groups = (num_segments + cuts.together - 1) // cuts.together
    order = segments.ids if segments.order is None else segments.order
    launch(
        pieces_kernel,
        (groups + whole) * -(-width // block),
        (rows, order, segments.ids, segments.bounds, out, partial),
        (num_rows, num_segments, cuts.piece, rows.stride(0)),
        {
            "W": width,
            "BLOCK_M": rows_of(block),
            "BLOCK": block,
            "STEP": step_of([int(rows.stride(0))]),
            "ORDERED": segments.order is not None,
            "TOGETHER": cuts.together,
            "num_warps": 4,
        },
        wrap,
    )
    if is_zero(whole):
        return out
    block = min(block, SHARE_COLUMNS)
    launch(
        shares_kernel,
        whole * -(-width // block),
        (segments.ids, segments.bounds, out, partial),
        (num_rows, num_segments, cuts.piece),
        {"W": width, "BLOCK_M": rows_of(block), "BLOCK": block, "num_warps": 4},
        wrap,
    )
    return out


def rows_of(block: int) -> int:
    """Of a block with so many columns."""
    # Places of many rows take registers.
    return max(1, min(MOST_ROWS, (ENTRIES if block == LONGEST_BLOCK else ENTRIES // 2) // block))


def cuts_of(num_rows: int, num_segments: int, block: int, *, ordered: bool) -> Cuts:
    """By the mean length of a segment. In a traced graph it may be unknown: then rows that have been put in
    order are taken to be of long segments, others of short ones."""
    several = Cuts(SHORT_PIECE, rows_of(block))
    if not (isinstance(num_rows, int) and isinstance(num_segments, int)):
        return Cuts(TRACED_PIECE, 1) if ordered else several
    if num_rows < SHORT * num_segments:
        return several
    piece = 1 << max(0, num_rows // PIECES - 1).bit_length()
    return Cuts(max(SMALLEST_PIECE, piece), 1)


@traceable_op("segment_sum_triton")
def segment_sum_triton(values: Tensor, lengths: Tensor) -> Tensor:
    """`segment_sum` for traced graphs."""
    return launch_sums(values, consecutive(lengths, values.shape[0]), values.dtype, wrap_triton)


@traceable_op("segment_sum_triton_backward")
def segment_sum_triton_backward(grad_out: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """The gradient of `values`."""
    return launch_gather([grad_out], segment_ids(lengths, num_rows), wrap_triton)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, lengths = inputs
    ctx.save_for_backward(lengths)
    ctx.num_rows = values.shape[0]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
    (lengths,) = ctx.saved_tensors
    return segment_sum_triton_backward(grad_out, lengths, ctx.num_rows), None


differentiable(segment_sum_triton, _backward, _setup_context)
