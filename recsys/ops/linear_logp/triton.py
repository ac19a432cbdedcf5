"""Launches the Triton kernels of `linear_logp`: block sizes, parts and their sums; library ops for graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.linear_logp.launch import (
    MAX_PARTS,
    PART_NUMBERS,
    Marks,
    Side,
    balanced,
    finished,
    or_else,
    precision,
    prepared,
    row_sums_of,
    rows_by_torch,
    rows_of,
    sides_of,
    tiles_of,
)
from recsys.ops.linear_logp.recompute import (
    Backend,
    Gradients,
    Operands,
    OutputGrads,
    RequestedGrads,
    RowOutputs,
    RowSums,
    rebuilt,
)
from recsys.ops.linear_logp.triton_kernels import backward_kernel, forward_kernel
from recsys.ops.runtime.launch import Wrap, launch
from recsys.ops.runtime.registration import flat_signature, traceable_op
from recsys.ops.runtime.triton_support import block_width, num_processors


def backend() -> Backend:
    """Returns the loops over scores."""
    return BACKEND


class Blocks(NamedTuple):
    """Block sizes and launch parameters of a kernel."""

    rows: int  # BLOCK_M, rows of the operand that a program owns
    others: int  # BLOCK_N, rows per block of the other operand
    num_warps: int
    num_stages: int
    programs: int = 1
    """Programs that run on a multiprocessor at a time."""


FORWARD = {
    "16 bits": {
        64: Blocks(128, 64, 4, 4, programs=3),
        128: Blocks(128, 64, 8, 3, programs=2),
        256: Blocks(128, 128, 8, 2),
        512: Blocks(64, 64, 4, 2),
    },
    "16 bits, ids": {
        64: Blocks(128, 64, 8, 3, programs=2),
        128: Blocks(128, 64, 8, 2, programs=2),
        256: Blocks(128, 64, 8, 2),
        512: Blocks(64, 64, 4, 2),
    },
    "32 bits": {64: Blocks(128, 64, 8, 2), 128: Blocks(64, 32, 4, 2)},
}
"""Sizes by kind of call and width in columns: 64-bit ids take registers, and so does float32 (three TF32
products)."""

OF_HIDDEN = {
    "16 bits": {
        64: Blocks(64, 128, 4, 3, programs=2),
        128: Blocks(64, 64, 4, 3, programs=2),
        256: Blocks(128, 64, 8, 2),
        512: Blocks(64, 64, 8, 2),
    },
    "16 bits, ids": {
        64: Blocks(128, 64, 8, 3),
        128: Blocks(128, 32, 8, 3),
        256: Blocks(64, 64, 8, 2),
        512: Blocks(64, 32, 8, 2),
    },
    "32 bits": {64: Blocks(64, 64, 8, 2), 128: Blocks(64, 16, 8, 2)},
}

OF_WEIGHT = OF_HIDDEN | {
    "16 bits": {
        64: Blocks(128, 64, 4, 3, programs=2),
        128: Blocks(64, 128, 4, 2, programs=2),
        256: Blocks(128, 64, 8, 2),
        512: Blocks(64, 64, 8, 2),
    }
}

SPLIT_WIDTH = {2: 128, 4: 0}
"""Widest rows, in columns, by bytes per entry, for which registers suffice for a second loop."""


def launch_forward(operands: Operands, wrap: Wrap | None = None) -> RowSums:
    """Computes each row's sums over all candidates; the operands have been validated and are not empty."""
    operands = prepared(operands)
    return row_sums_of(operands, *launch_sums(operands, wrap), wrap)


def fused_forward(operands: Operands, ignore_index: int | None) -> RowOutputs:
    """Computes all outputs in two launches; the operands have been validated and are not empty."""
    operands = prepared(operands)
    maxima, totals = launch_sums(operands)
    return finished(operands, maxima, totals, ignore_index)


def launch_sums(operands: Operands, wrap: Wrap | None = None) -> tuple[Tensor, Tensor]:
    """Computes the maximum and the sum of each row over each part of the candidates, [parts, N] each."""
    hidden, weight, bias, scale, *rest = operands
    num_rows, num_candidates = hidden.shape[0], weight.shape[0]
    blocks = blocks_of(operands, FORWARD)
    row_tiles, tiles = tiles_of(num_rows, blocks.rows), tiles_of(num_candidates, blocks.others)
    parts, per_part = parts_of(row_tiles, tiles, blocks, hidden.device, MAX_PARTS)
    maxima, totals = (scale.new_empty(parts, num_rows) for _ in range(2))
    constants = constants_of(operands, blocks)
    launch(
        forward_kernel,
        row_tiles * parts,
        (hidden, weight, *or_else(hidden, bias), scale, *or_else(hidden, *rest), maxima, totals),
        (num_rows, num_candidates, per_part),
        constants,
        wrap,
    )
    return maxima, totals


def launch_backward(
    operands: Operands, output_grads: OutputGrads, requested: RequestedGrads, wrap: Wrap | None = None
) -> Gradients:
    """Computes the requested gradients; the operands have been validated and are not empty."""
    operands = prepared(operands)
    return launch_gradients(
        operands, *rows_by_torch(operands, output_grads, _sides(operands)), requested, wrap
    )


def fused_backward(
    operands: Operands,
    outputs: RowOutputs,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    requested: RequestedGrads,
) -> Gradients:
    """Computes what `launch_backward` computes, from the gradients of the outputs, with one launch before the
    large ones."""
    operands = prepared(operands)
    by_row = rows_of(operands, outputs, (grad_logp, grad_lse), _sides(operands))
    return launch_gradients(operands, *by_row, requested)


def _sides(operands: Operands) -> tuple[Side, Side]:
    return sides_of(operands, blocks_of(operands, OF_HIDDEN), blocks_of(operands, OF_WEIGHT))


def launch_gradients(
    operands: Operands,
    vectors: Tensor,
    rows: Tensor,
    marks: Marks,
    requested: RequestedGrads,
    wrap: Wrap | None = None,
) -> Gradients:
    """Computes the requested gradients. The operands are `prepared`; the other arguments are as
    `upstream_kernel` writes them."""
    grad_hidden = grad_weight = grad_bias = grad_scale = None
    if requested.hidden or requested.scale:
        side = (operands, vectors, rows, marks.hidden, wrap)
        grad_hidden, _, grad_scale = launch_side(*side, of_weight=False, with_scale=requested.scale)
    if requested.weight or requested.bias:
        side = (operands, vectors, rows, marks.weight, wrap)
        grad_weight, grad_bias, _ = launch_side(*side, of_weight=True, with_bias=requested.bias)
    return Gradients(
        grad_hidden if requested.hidden else None,
        grad_weight if requested.weight else None,
        grad_bias,
        grad_scale,
    )


def launch_side(
    operands: Operands,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    wrap: Wrap | None,
    *,
    of_weight: bool,
    with_bias: bool = False,
    with_scale: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes the gradient of one operand, float32 for hidden and the weight's own dtype for the weight;
    that of the bias; and that of the scale."""
    hidden, weight, bias, scale, _, candidate_ids, target_ids, *norms = operands
    owned, streamed = (weight, hidden) if of_weight else (hidden, weight)
    num_owned, width = owned.shape[0], int(owned.shape[1])
    blocks = blocks_of(operands, OF_WEIGHT if of_weight else OF_HIDDEN)
    owned_tiles, tiles = tiles_of(num_owned, blocks.rows), tiles_of(streamed.shape[0], blocks.others)
    most = min(MAX_PARTS, 1 + PART_NUMBERS // (num_owned * width))
    parts, per_part = parts_of(owned_tiles, tiles, blocks, owned.device, most)
    in_place = of_weight and not _is_split(parts)
    grad = owned.new_empty(parts, num_owned, width, dtype=owned.dtype if in_place else scale.dtype)
    grad_bias = scale.new_empty(parts, num_owned) if with_bias else grad
    grad_scale = scale.new_empty(parts, num_owned) if with_scale else grad
    constants = constants_of(operands, blocks) | {
        "OF_WEIGHT": of_weight,
        "WITH_BIAS": with_bias,
        "WITH_SCALE": with_scale,
    }
    owned_norms, streamed_norms = reversed(norms) if of_weight else norms
    launch(
        backward_kernel,
        owned_tiles * parts,
        (
            *(owned, streamed, *or_else(owned, bias), scale, rows),
            *or_else(owned, candidate_ids, target_ids, owned_norms, streamed_norms),
            *(*vectors.unbind(0), marks, grad, grad_bias, grad_scale),
        ),
        (num_owned, streamed.shape[0], per_part),
        constants,
        wrap,
    )
    summed = grad.sum(0) if _is_split(parts) else grad[0]
    return (
        summed.to(owned.dtype) if of_weight else summed,
        grad_bias.sum(0) if with_bias else None,
        grad_scale.sum().reshape(1) if with_scale else None,
    )


def _is_split(parts: int) -> bool:
    """Returns False for a single part. A number that a traced graph leaves symbolic counts as several."""
    return not isinstance(parts, int) or parts > 1


def parts_of(
    owned_tiles: int, tiles: int, blocks: Blocks, device: torch.device, most: int
) -> tuple[int, int]:
    """Returns the number of parts into which the other operand is cut, and the most tiles in a part.

    The number keeps all processors busy to the end; a traced graph, which does not know sizes, takes four.
    """
    if isinstance(owned_tiles, int) and isinstance(tiles, int) and isinstance(most, int):
        return balanced(owned_tiles, tiles, num_processors(device) * blocks.programs, min(most, tiles))
    per_part = (tiles + 3) // 4
    return (tiles + per_part - 1) // per_part, per_part


def blocks_of(operands: Operands, table: dict[str, dict[int, Blocks]]) -> Blocks:
    """Returns the entry of `table` (`FORWARD`, `OF_HIDDEN` or `OF_WEIGHT`) for these operands."""
    kind = "16 bits"
    if operands.candidate_ids is not None or operands.hidden_norms is not None:
        kind = "16 bits, ids"
    if operands.hidden.dtype == torch.float32:
        kind = "32 bits"
    return table[kind][block_width(operands.hidden.shape[1], least=64)]


def constants_of(operands: Operands, blocks: Blocks) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels, by the names of their parameters."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.others,
        "BLOCK_D": block_width(width),
        "NORMED": operands.hidden_norms is not None,
        "BIASED": operands.bias is not None,
        "HAS_TARGET": operands.target is not None,
        "HAS_IDS": operands.candidate_ids is not None,
        "PRECISION": precision(),
        "SPLIT": width <= SPLIT_WIDTH[operands.hidden.dtype.itemsize],
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


@traceable_op("linear_logp_triton")
@flat_signature(Operands, returns=tuple[Tensor, Tensor, Tensor])
def forward_op(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `launch_forward` in traced graphs."""
    return tuple(launch_forward(Operands(*operands), wrap_triton))


@traceable_op("linear_logp_triton_backward")
@flat_signature(Operands, OutputGrads, {"requested": list[bool]}, returns=list[Tensor])
def backward_op(*arguments: Any) -> list[Tensor]:
    """Runs `launch_backward` in traced graphs; returns the `requested` gradients in order."""
    grads = launch_backward(*rebuilt(arguments), wrap_triton)
    return [gradient for gradient in grads if gradient is not None]


BACKEND = Backend(launch_forward, launch_backward, forward_op, backward_op, fused_forward, fused_backward)
