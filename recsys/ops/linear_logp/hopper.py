"""Launches the Hopper kernels of `linear_logp`; chooses their block sizes and splits into parts.

The Triton kernels do the work per row, and compute the gradients of narrow rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.linear_logp import launch
from recsys.ops.linear_logp import triton as triton_backend
from recsys.ops.linear_logp.hopper_kernels import STRIP, forward_kernel, gradient_kernel, score_grads_kernel
from recsys.ops.linear_logp.recompute import (
    Backend,
    Gradients,
    Operands,
    OutputGrads,
    RequestedGrads,
    RowOutputs,
    RowSums,
)
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.hopper_launch import launch as launch_kernel
from recsys.ops.runtime.triton_support import block_width, num_processors

WARPS = 4
"""Warps per warp group."""


def backend() -> Backend:
    """Returns the loops over scores; traced graphs hold the Triton kernels."""
    return BACKEND


class KernelSizes(NamedTuple):
    """Sizes of a kernel for one width of rows."""

    others: int  # BLOCK_N, rows per block of the other operand
    stages: int
    strips: int  # strips of 64 rows per tile, one warp group each
    computing_registers: int
    loading_registers: int = 24

    @property
    def rows(self) -> int:
        """Rows per tile."""
        return STRIP.value * self.strips


FORWARD = {64: KernelSizes(128, 6, 4, 120), 128: KernelSizes(128, 4, 4, 120), 256: KernelSizes(64, 4, 2, 240)}
"""Sizes of the forward kernel, by width in columns."""

GRADIENTS = {128: KernelSizes(128, 4, 2, 240), 256: KernelSizes(64, 4, 2, 240)}
"""Sizes of the gradient kernel, by width in columns, for either operand."""

NARROW = 64
"""Up to this width in columns the Triton kernels compute gradients faster: most of the work is outside the
products, and several plain programs per processor overlap it better."""

PIECE = 8
"""Columns per 16 bytes, the unit of a tensor map."""

WIDE_FROM = 257
"""Width in columns from which on the gradients of the scores are written to memory, one section of the
candidates at a time."""

WIDE_COLUMNS = 64
"""Columns per piece of a wide row: 128 bytes, one line of shared memory as the tensor cores read it."""

WIDE_SUMS = KernelSizes(128, 5, 2, 240)
WIDE_SCORE_GRADS = KernelSizes(128, 3, 2, 240)
"""Sizes for wide rows, of which a stage holds one piece."""

SECTION_NUMBERS = 1 << 25
"""Score gradients that are held in memory at a time: 64 MiB."""

LEAST_SECTION = 512
"""Fewest candidates per section."""


def forward(operands: Operands) -> RowSums:
    """Computes each row's sums over all candidates. The operands have been validated, are not empty, and have
    no bias or ids."""
    operands = launch.prepared(with_own_rows(operands))
    return launch.row_sums_of(operands, *launch_sums(operands))


def fused_forward(operands: Operands, ignore_index: int | None) -> RowOutputs:
    """Computes all outputs; the operands are as for `forward`."""
    operands = launch.prepared(with_own_rows(operands))
    return launch.finished(operands, *launch_sums(operands), ignore_index)


def with_own_rows(operands: Operands) -> Operands:
    """Returns the operands with rows that a tensor map can describe, normalized if requested.

    Where needed the rows are copies that live for one pass: padded with zeros to multiples of 16 bytes,
    multiplied by the inverse norms and rounded.
    """
    hidden, weight, *_, hidden_norms, weight_norms = operands
    if hidden_norms is None and hidden.shape[1] % PIECE == 0:
        return operands
    hidden, weight = _copied(hidden, hidden_norms), _copied(weight, weight_norms)
    return operands._replace(hidden=hidden, weight=weight, hidden_norms=None, weight_norms=None)


def _copied(rows: Tensor, norms: Tensor | None) -> Tensor:
    count, width = rows.shape
    whole = rows.new_empty(count, -(-width // PIECE) * PIECE)
    whole[:, width:] = 0
    if norms is None:
        whole[:, :width] = rows
    else:
        torch.mul(rows, norms[:, None], out=whole[:, :width])
    return whole


def of_given_rows(grads: Gradients, operands: Operands) -> Gradients:
    """Converts gradients of `with_own_rows(operands)` to gradients of `operands`."""
    return grads._replace(
        hidden=_of_given(grads.hidden, operands.hidden, operands.hidden_norms),
        weight=_of_given(grads.weight, operands.weight, operands.weight_norms),
    )


def _of_given(grad: Tensor | None, rows: Tensor, norms: Tensor | None) -> Tensor | None:
    if grad is None or norms is None:
        return grad if grad is None else grad[:, : rows.shape[1]]
    return launch.project(grad, rows.contiguous(), norms)


def launch_sums(operands: Operands) -> tuple[Tensor, Tensor]:
    """Computes the maximum and the sum of each row over each part of the candidates, [parts, N] each."""
    hidden, weight, _, scale, *_ = operands
    width = width_of(operands)
    columns, pieces = pieces_of(width)
    sizes = WIDE_SUMS if is_wide(operands) else FORWARD[width]
    cut = cut_for(hidden, weight, sizes, launch.MAX_PARTS)
    maxima, totals = (scale.new_empty(cut.parts, hidden.shape[0]) for _ in range(2))
    launch_kernel(
        forward_kernel,
        (hidden.dtype, width, sizes),
        cut.programs,
        boxes(hidden, weight, sizes, columns),
        (scale, maxima, totals),
        cut.numbers,
        lambda: constants_of(sizes, columns) | {"PIECES": pieces},
    )
    return maxima, totals


def backward(operands: Operands, output_grads: OutputGrads, requested: RequestedGrads) -> Gradients:
    """Computes what `triton_backend.launch_backward` computes."""
    prepared = launch.prepared(with_own_rows(operands))
    if width_of(prepared) <= NARROW:
        grads = triton_backend.launch_backward(prepared, output_grads, requested)
    else:
        grads = gradients(prepared, *launch.rows_by_torch(prepared, output_grads, sides(prepared)), requested)
    return of_given_rows(grads, operands)


def fused_backward(
    operands: Operands,
    outputs: RowOutputs,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    requested: RequestedGrads,
) -> Gradients:
    """Computes what `triton_backend.fused_backward` computes."""
    prepared = launch.prepared(with_own_rows(operands))
    if width_of(prepared) <= NARROW:
        grads = triton_backend.fused_backward(prepared, outputs, grad_logp, grad_lse, requested)
    else:
        by_row = launch.rows_of(prepared, outputs, (grad_logp, grad_lse), sides(prepared))
        grads = gradients(prepared, *by_row, requested)
    return of_given_rows(grads, operands)


def sides(operands: Operands) -> tuple[launch.Side, launch.Side]:
    """Returns the tiles of the two gradient kernels."""
    width = width_of(operands)
    if is_wide(operands):
        return launch.sides_of(operands, WIDE_SCORE_GRADS, WIDE_SCORE_GRADS)
    return launch.sides_of(operands, GRADIENTS[width], GRADIENTS[width])


def is_wide(operands: Operands) -> bool:
    """Returns True if the gradients of the scores are written to memory."""
    return width_of(operands) >= WIDE_FROM


def gradients(
    operands: Operands, vectors: Tensor, rows: Tensor, marks: launch.Marks, requested: RequestedGrads
) -> Gradients:
    """Computes the requested gradients. The operands are `prepared`; the other arguments are as
    `upstream_kernel` writes them."""
    if is_wide(operands):
        return wide_gradients(operands, vectors, rows, marks.hidden, requested)
    grad_hidden = grad_weight = grad_scale = None
    if requested.hidden or requested.scale:
        shared = (operands, vectors, rows, marks.hidden)
        grad_hidden, grad_scale = _launch_side(*shared, of_weight=False, with_scale=requested.scale)
    if requested.weight:
        grad_weight, _ = _launch_side(operands, vectors, rows, marks.weight, of_weight=True)
    return Gradients(grad_hidden if requested.hidden else None, grad_weight, None, grad_scale)


def _launch_side(
    operands: Operands,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    *,
    of_weight: bool,
    with_scale: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradient of one operand, float32 for hidden and the weight's own dtype for the weight, and
    that of the scale if `with_scale`."""
    hidden, weight, _, scale, target, *_ = operands
    owned, streamed = (weight, hidden) if of_weight else (hidden, weight)
    num_owned, columns = owned.shape
    width = width_of(operands)
    sizes = GRADIENTS[width]
    max_parts = min(launch.MAX_PARTS, 1 + launch.PART_NUMBERS // (num_owned * columns))
    cut = cut_for(owned, streamed, sizes, max_parts)
    dtype = owned.dtype if of_weight and cut.parts == 1 else scale.dtype
    grad = owned.new_empty(cut.parts, num_owned, columns, dtype=dtype)
    grad_scale = scale.new_empty(cut.parts, num_owned) if with_scale else scale
    kind = {"OF_WEIGHT": of_weight, "HAS_TARGET": target is not None, "WITH_SCALE": with_scale}
    launch_kernel(
        gradient_kernel,
        (hidden.dtype, width, sizes, dtype, *kind.values()),
        cut.programs,
        boxes(owned, streamed, sizes, width),
        (scale, *vectors.unbind(0), rows, marks, grad, grad_scale),
        (*cut.numbers, columns),
        lambda: constants_of(sizes, width) | kind,
    )
    summed = grad.sum(0) if cut.parts > 1 else grad[0]
    if of_weight:
        summed = summed.to(owned.dtype)
    return summed, grad_scale.sum().reshape(1) if with_scale else None


def wide_gradients(
    operands: Operands, vectors: Tensor, rows: Tensor, marks: Tensor, requested: RequestedGrads
) -> Gradients:
    """Computes what `gradients` computes, one section of the candidates at a time: gradients of the scores,
    then two library products."""
    hidden, weight, _, scale, *_ = operands
    num_candidates = weight.shape[0]
    size = section_of(*hidden.shape[:1])
    room = hidden.new_empty(hidden.shape[0], min(size, -(-num_candidates // 8) * 8))
    grad_hidden = scale.new_zeros(hidden.shape) if requested.hidden else None
    grad_weight = torch.empty_like(weight) if requested.weight else None
    grad_scale = scale.new_zeros(1) if requested.scale else None
    for first in range(0, num_candidates, size):
        section = slice(first, min(first + size, num_candidates))
        score_grads = room[:, : section.stop - first]
        share = _launch_score_grads(
            operands, score_grads, vectors, rows, marks, section, with_scale=requested.scale
        )
        if grad_hidden is not None:
            grad_hidden += torch.mm(score_grads, weight[section], out_dtype=scale.dtype)
        if grad_weight is not None:
            # `out_dtype` keeps the library from summing in 16 bits, whatever PyTorch's settings allow.
            grad_weight[section] = torch.mm(score_grads.t(), hidden, out_dtype=scale.dtype)
        if grad_scale is not None:
            grad_scale += share.sum()
    return Gradients(grad_hidden, grad_weight, None, grad_scale)


def section_of(num_rows: int) -> int:
    """Returns the number of candidates per section, a whole number of blocks."""
    block = WIDE_SCORE_GRADS.others
    return max(LEAST_SECTION, SECTION_NUMBERS // num_rows // block * block)


def _launch_score_grads(
    operands: Operands,
    score_grads: Tensor,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    section: slice,
    *,
    with_scale: bool,
) -> Tensor:
    """Writes `score_grads` and returns each row's share [parts, N] of the scale's gradient, if requested."""
    hidden, weight, _, scale, target, *_ = operands
    sizes, others = WIDE_SCORE_GRADS, weight[section]
    cut = cut_for(hidden, others, sizes, launch.MAX_PARTS)
    grad_scale = scale.new_empty(cut.parts, hidden.shape[0]) if with_scale else scale
    kind = {"HAS_TARGET": target is not None, "WITH_SCALE": with_scale}
    columns, pieces = pieces_of(width_of(operands))
    block = sizes.others
    launch_kernel(
        score_grads_kernel,
        (hidden.dtype, pieces, sizes, *kind.values()),
        cut.programs,
        (*boxes(hidden, others, sizes, columns), Boxes(score_grads.unsqueeze(1), STRIP.value, block)),
        (scale, *vectors.unbind(0), rows, marks, grad_scale),
        (*cut.numbers, section.start // block, -(-weight.shape[0] // block)),
        lambda: constants_of(sizes, columns) | kind | {"PIECES": pieces},
    )
    return grad_scale


class Cut(NamedTuple):
    """Units of work of a launch."""

    numbers: tuple[int, int, int, int, int]  # the `work` tuple of `hopper_kernels`
    parts: int
    programs: int


def cut_for(owned: Tensor, streamed: Tensor, sizes: KernelSizes, max_parts: int) -> Cut:
    """Cuts the work for one program per processor, into the number of parts that keeps all busy to the
    end."""
    processors = num_processors(owned.device)
    tiles, blocks = -(-owned.shape[0] // sizes.rows), -(-streamed.shape[0] // sizes.others)
    parts, per_part = launch.balanced(tiles, blocks, processors, min(max_parts, blocks))
    units = tiles * parts
    return Cut((owned.shape[0], streamed.shape[0], tiles, units, per_part), parts, min(units, processors))


def boxes(owned: Tensor, streamed: Tensor, sizes: KernelSizes, width: int) -> tuple[Boxes, Boxes]:
    """Returns the blocks that the descriptors of two matrices load."""
    owned, streamed = (with_loadable_rows(matrix.unsqueeze(1)) for matrix in (owned, streamed))
    return Boxes(owned, STRIP.value, width), Boxes(streamed, sizes.others, width)


def constants_of(sizes: KernelSizes, columns: int) -> dict[str, Any]:
    """Returns the compile-time constants that all kernels have, by the names of their parameters."""
    return {
        "BLOCK_D": columns,
        "BLOCK_N": sizes.others,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
    }


def width_of(operands: Operands) -> int:
    """Returns the columns of a block that holds whole rows."""
    columns = operands.hidden.shape[1]
    if columns >= WIDE_FROM:
        return -(-columns // WIDE_COLUMNS) * WIDE_COLUMNS
    return block_width(columns, least=64)


def pieces_of(width: int) -> tuple[int, int]:
    """Returns the columns per piece of a row, and the number of pieces."""
    return (width, 1) if width < WIDE_FROM else (WIDE_COLUMNS, width // WIDE_COLUMNS)


BACKEND = Backend(
    forward, backward, triton_backend.forward_op, triton_backend.backward_op, fused_forward, fused_backward
)
