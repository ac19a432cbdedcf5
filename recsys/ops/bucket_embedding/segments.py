"""Sums rows by segment, for the gradients of tables; launches the kernels in `segment_kernels`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.bucket_embedding.segment_kernels import pieces_kernel, shares_kernel
from recsys.ops.jagged.triton_ops import dense_rows, is_zero, step_of, width_of
from recsys.ops.runtime.launch import Wrap, launch

ENTRIES = 4096
"""Entries per program's block, rows x columns, with at most `MOST_ROWS` rows."""

MOST_ROWS = 128

LONGEST_BLOCK = 256
"""Most columns per block; a longer row has several blocks."""

SHARE_COLUMNS = 64
"""Columns per block of the second kernel, whose programs spend most of their time waiting."""

SHORT = 8
"""Mean rows per segment below which a program takes several segments."""

SHORT_PIECE = 64
PIECES = 1024
"""Approximate total number of pieces into which long segments are cut, which keeps both kernels short."""

SMALLEST_PIECE, TRACED_PIECE = 64, 256


class Segments(NamedTuple):
    """Rows sorted by segment, for K segments.

    Attributes:
        ids: [n], the segment of each row, sorted; rows outside [0, K) are in no sum.
        bounds: int64 [K + 1], first row of each segment, and the end.
        order: int64 [n], the row of the values at each sorted position.
    """

    ids: Tensor
    bounds: Tensor
    order: Tensor


class Cuts(NamedTuple):
    """Rows per chunk (`piece`) and segments per program (`together`)."""

    piece: int
    together: int


def launch_sums(values: Tensor, segments: Segments, dtype: torch.dtype, wrap: Wrap | None = None) -> Tensor:
    """Returns the sums [K, ...], in `dtype`, of values [n, ...]; the arguments have been validated."""
    num_rows, num_segments = segments.ids.shape[0], segments.bounds.shape[0] - 1
    width = width_of(values)
    out = values.new_empty((num_segments, *values.shape[1:]), dtype=dtype)
    if is_zero(num_segments) or width == 0:
        return out
    rows = dense_rows(values, width)
    block = min(1 << (width - 1).bit_length(), LONGEST_BLOCK)
    cuts = cuts_of(num_rows, num_segments, block)
    whole = num_rows // cuts.piece  # complete chunks; there may be one more that is incomplete
    partial = values.new_empty((2 * (whole + 1), width), dtype=torch.float32)
    groups = (num_segments + cuts.together - 1) // cuts.together
    launch(
        pieces_kernel,
        (groups + whole) * -(-width // block),
        (rows, segments.order, segments.ids, segments.bounds, out, partial),
        (num_rows, num_segments, cuts.piece, rows.stride(0)),
        {
            "W": width,
            "BLOCK_M": rows_of(block),
            "BLOCK": block,
            "STEP": step_of([int(rows.stride(0))]),
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
    """Returns the rows of a block with `block` columns; the addresses of more rows would take registers."""
    return max(1, min(MOST_ROWS, (ENTRIES if block == LONGEST_BLOCK else ENTRIES // 2) // block))


def cuts_of(num_rows: int, num_segments: int, block: int) -> Cuts:
    """Returns the cuts that suit the mean length of segments; a traced graph, which may not know it, assumes
    long segments."""
    if not (isinstance(num_rows, int) and isinstance(num_segments, int)):
        return Cuts(TRACED_PIECE, 1)
    if num_rows < SHORT * num_segments:
        return Cuts(SHORT_PIECE, rows_of(block))
    piece = 1 << max(0, num_rows // PIECES - 1).bit_length()
    return Cuts(max(SMALLEST_PIECE, piece), 1)
