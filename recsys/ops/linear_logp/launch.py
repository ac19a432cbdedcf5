"""Launches the work per row of `linear_logp`, before and after the loops over scores, by the kernels of
`triton_kernels`; has what all launches share: padded operands and splits into parts."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.linear_logp.recompute import Operands, OutputGrads, RowOutputs, RowSums, is_row
from recsys.ops.linear_logp.triton_kernels import (
    finish_kernel,
    project_kernel,
    target_kernel,
    upstream_kernel,
)
from recsys.ops.runtime.launch import Wrap, launch
from recsys.ops.runtime.triton_support import block_width

LARGEST_BLOCK = 256
"""Most rows of any tile."""

MAX_PARTS = 64
"""Most programs that share the candidates of a tile of rows."""

PART_NUMBERS = 1 << 24
"""Most partial gradient entries in all parts but one: 64 MiB of float32."""


def prepared(operands: Operands) -> Operands:
    """Returns the operands as kernels take them: matrices contiguous, vectors padded to whole tiles."""
    hidden, weight, bias, scale, target, candidate_ids, target_ids, *norms = operands
    bias = None if bias is None else to_whole_tiles(bias.float())
    candidate_ids, target_ids, *norms = (
        None if vector is None else to_whole_tiles(vector) for vector in (candidate_ids, target_ids, *norms)
    )
    target = None if target is None else target.contiguous()
    matrices = (hidden.contiguous(), weight.contiguous())
    return Operands(*matrices, bias, scale, target, candidate_ids, target_ids, *norms)


def to_whole_tiles(tensor: Tensor, fill: float = 0) -> Tensor:
    """Pads a vector [n] with `fill` to the end of the last tile, so that loads need no bounds."""
    missing = -tensor.shape[0] % LARGEST_BLOCK + LARGEST_BLOCK
    return torch.nn.functional.pad(tensor, (0, missing), value=fill).contiguous()


def tiles_of(size: int, block: int) -> int:
    """Returns the number of tiles of `block` that cover `size`."""
    return (size + block - 1) // block


def or_else(instead: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the tensors, with `instead` as a placeholder for each None."""
    return tuple(instead if tensor is None else tensor for tensor in tensors)


def precision() -> str:
    """Returns Triton's `input_precision` for float32 products, following PyTorch's setting."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=1024)
def balanced(owned_tiles: int, tiles: int, slots: int, max_parts: int) -> tuple[int, int]:
    """Returns the number of parts, at most `max_parts`, with which the slots finish first, and the number of
    tiles per part."""

    def rounds(parts: int) -> int:
        per_part = -(-tiles // parts)
        return -(-owned_tiles * -(-tiles // per_part) // slots) * (per_part + 1)

    parts = min(range(1, max(1, max_parts) + 1), key=rounds)
    per_part = -(-tiles // parts)
    return -(-tiles // per_part), per_part


LOG2E = math.log2(math.e)

ROWS = 64
"""Rows per program."""

FEW_ROWS = 16
"""Rows per program in kernels that only read and write them."""


def row_sums_of(operands: Operands, maxima: Tensor, totals: Tensor, wrap: Wrap | None = None) -> RowSums:
    """Merges the maxima and totals [parts, N] of the parts; the operands are `prepared`."""
    best = maxima.amax(0)
    finite = torch.where(best == -torch.inf, 0, best)
    total = (totals * (maxima - finite).exp()).sum(0)
    return RowSums(best, total, target_scores(operands, wrap))


def finished(operands: Operands, maxima: Tensor, totals: Tensor, ignore_index: int | None) -> RowOutputs:
    """Computes all outputs from maxima and totals [parts, N] in one launch; the operands are `prepared`."""
    hidden, weight, bias, scale, target, _, _, *norms = operands
    parts, num_rows = maxima.shape
    outputs = scale.new_empty(4, num_rows)
    constants = row_constants(operands)
    inputs = (hidden, weight, *or_else(hidden, bias), scale, *or_else(hidden, target, *norms))
    launch(
        finish_kernel,
        tiles_of(num_rows, constants["BLOCK"]),
        (*inputs, maxima, totals, outputs),
        (num_rows, weight.shape[0], parts, ignore_index or 0),
        constants | {"HAS_TARGET": target is not None},
    )
    return RowOutputs(*outputs.unbind(0))


def target_scores(operands: Operands, wrap: Wrap | None) -> Tensor:
    """Computes the scores [N] of the targets, arbitrary for rows without one; the operands are `prepared`."""
    hidden, weight, bias, scale, target, _, _, *norms = operands
    num_rows = hidden.shape[0]
    scores = scale.new_empty(num_rows)
    if target is None:
        return scores.zero_()
    constants = row_constants(operands)
    launch(
        target_kernel,
        tiles_of(num_rows, constants["BLOCK"]),
        (hidden, weight, *or_else(hidden, bias), scale, target, *or_else(hidden, *norms), scores),
        (num_rows, weight.shape[0]),
        constants,
        wrap,
    )
    return scores


def project(grad: Tensor, rows: Tensor, norms: Tensor) -> Tensor:
    """Computes the gradient [n, D] of rows; `grad` [n, D or more columns] is that of their normalized forms.

    Without extra columns the result reuses the memory of `grad`.
    """
    count, width = rows.shape[0], int(rows.shape[1])
    stride = int(grad.shape[1])
    out = grad if stride == width else grad.new_empty(count, width)
    constants = {"D": width, "STRIDE": stride, "BLOCK": FEW_ROWS, "BLOCK_D": block_width(width)}
    launch(
        project_kernel,
        tiles_of(count, FEW_ROWS),
        (grad, rows, norms, out),
        (count,),
        constants | {"num_warps": 4},
    )
    return out


class Side(NamedTuple):
    """Tiles of a gradient kernel, over the operand whose gradient it computes and over the other operand."""

    rows: int  # rows per tile of the operand
    others: int  # rows per tile of the other operand
    tiles: int
    streamed_tiles: int


class Marks(NamedTuple):
    """uint8 flags of the tiles with targets, for the two gradient kernels; unused without targets."""

    hidden: Tensor
    weight: Tensor


def sides_of(operands: Operands, of_hidden: Any, of_weight: Any) -> tuple[Side, Side]:
    """Returns the sides of the two gradient kernels from their sizes, which have `rows` and `others`."""
    rows, candidates = operands.hidden.shape[0], operands.weight.shape[0]
    return tuple(
        Side(sizes.rows, sizes.others, tiles_of(owned, sizes.rows), tiles_of(streamed, sizes.others))
        for sizes, owned, streamed in ((of_hidden, rows, candidates), (of_weight, candidates, rows))
    )


def rows_of(
    operands: Operands,
    outputs: RowOutputs,
    grads: tuple[Tensor | None, Tensor | None],
    sides: tuple[Side, Side],
) -> tuple[Tensor, Tensor, Marks]:
    """Launches `upstream_kernel` and returns vectors, rows and marks, which its docstring describes."""
    target, num_rows = operands.target, operands.hidden.shape[0]
    padded = (tiles_of(num_rows, LARGEST_BLOCK) + 1) * LARGEST_BLOCK
    vectors = outputs.total.new_empty(3, padded)
    rows = outputs.total.new_empty(padded, dtype=torch.int32)
    of_hidden, of_weight = sides
    first, marks = 0, rows
    if target is not None:
        first = tiles_of(of_hidden.tiles * of_hidden.streamed_tiles, 16) * 16
        size = first + of_weight.tiles * of_weight.streamed_tiles
        marks = torch.zeros(size, dtype=torch.uint8, device=rows.device)
    constants = {
        "HAS_LOGP": grads[0] is not None,
        "HAS_LSE": grads[1] is not None,
        "HAS_TARGET": target is not None,
        "BLOCK": LARGEST_BLOCK,
        "HIDDEN_ROWS": of_hidden.rows,
        "HIDDEN_OTHERS": of_hidden.others,
        "WEIGHT_ROWS": of_weight.rows,
        "WEIGHT_OTHERS": of_weight.others,
        "num_warps": 4,
    }
    strides = (0 if grad is None else grad.stride(0) for grad in grads)
    launch(
        upstream_kernel,
        padded // LARGEST_BLOCK,
        (*or_else(vectors, *grads), outputs.maximum, *or_else(rows, target), vectors, rows, marks),
        (
            num_rows,
            operands.weight.shape[0],
            *strides,
            of_hidden.streamed_tiles,
            of_weight.streamed_tiles,
            first,
        ),
        constants,
    )
    return vectors, rows, Marks(marks, marks[first:])


def rows_by_torch(
    operands: Operands, output_grads: OutputGrads, sides: tuple[Side, Side]
) -> tuple[Tensor, Tensor, Marks]:
    """Computes what `rows_of` computes, in PyTorch, from output gradients that are already combined."""
    maximum, factor, of_target = output_grads
    top = torch.where(factor == 0, torch.inf, maximum - factor.abs().log()) * LOG2E
    sign = torch.where(factor < 0, -1.0, 1.0)
    padded = (to_whole_tiles(top, torch.inf), to_whole_tiles(sign), to_whole_tiles(of_target))
    vectors = torch.stack(padded)
    if (target := operands.target) is None:
        return vectors, vectors, Marks(vectors, vectors)
    target = torch.where(is_row(target, operands.weight.shape[0]), target, -1)
    row = torch.arange(target.shape[0], device=target.device)
    marks = Marks(_marks(row, target, target, sides[0]), _marks(target, row, target, sides[1]))
    return vectors, to_whole_tiles(target.int(), -1), marks


def _marks(owned: Tensor, streamed: Tensor, target: Tensor, side: Side) -> Tensor:
    """Returns the flags of one side's tiles, and one more flag for rows without a target (-1)."""
    size = side.tiles * side.streamed_tiles
    place = owned // side.rows * side.streamed_tiles + streamed // side.others
    place = torch.where(target < 0, size, place)
    marks = torch.zeros(size + 1, dtype=torch.uint8, device=target.device)
    return marks.index_fill_(0, place, 1)


def row_constants(operands: Operands) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels that score single candidates."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK": ROWS,
        "BLOCK_D": block_width(width),
        "NORMED": operands.hidden_norms is not None,
        "BIASED": operands.bias is not None,
        "PRECISION": precision(),
        "num_warps": 4,
    }
