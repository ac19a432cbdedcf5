"""Launches of what is left for each row beside the loops over scores: of the kernels of `triton_rows`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.linear_logp.launch import (
    LARGEST_BLOCK,
    Launch,
    launch_shortly,
    or_else,
    padded_width,
    precision,
    tiles_of,
    to_whole_tiles,
)
from recsys.ops.linear_logp.recompute import Found, Operands, Parts, Upstream, is_row
from recsys.ops.linear_logp.triton_rows import (
    finish_kernel,
    project_kernel,
    target_kernel,
    upstream_kernel,
)

LOG2E = math.log2(math.e)

ROWS = 64
"""Of a program."""

FEW_ROWS = 16
"""Of a program that only reads and writes them."""


def parts_of_sums(
    operands: Operands, maxima: Tensor, totals: Tensor, launch: Launch = launch_shortly
) -> Parts:
    """From [parts, N], the operands `prepared`."""
    best = maxima.amax(0)
    finite = torch.where(best == -torch.inf, 0, best)
    total = (totals * (maxima - finite).exp()).sum(0)
    return Parts(best, total, target_scores(operands, launch))


def finished(operands: Operands, maxima: Tensor, totals: Tensor, ignore_index: int | None) -> Found:
    """From [parts, N], the operands `prepared`."""
    hidden, weight, bias, scale, target, _, _, *norms = operands
    parts, num_rows = maxima.shape
    found = scale.new_empty(4, num_rows)
    constants = row_constants(operands)
    given = (hidden, weight, *or_else(hidden, bias), scale, *or_else(hidden, target, *norms))
    launch_shortly(
        finish_kernel,
        (hidden.dtype, *constants.values()),
        tiles_of(num_rows, constants["BLOCK"]),
        (*given, maxima, totals, found),
        (num_rows, weight.shape[0], parts, ignore_index or 0),
        constants | {"HAS_TARGET": target is not None},
    )
    return Found(*found.unbind(0))


def target_scores(operands: Operands, launch: Launch = launch_shortly) -> Tensor:
    """[N], the operands `prepared`; any number without a target."""
    hidden, weight, bias, scale, target, _, _, *norms = operands
    num_rows = hidden.shape[0]
    scores = scale.new_empty(num_rows)
    if target is None:
        return scores.zero_()
    constants = row_constants(operands)
    launch(
        target_kernel,
        (hidden.dtype, *constants.values()),
        tiles_of(num_rows, constants["BLOCK"]),
        (hidden, weight, *or_else(hidden, bias), scale, target, *or_else(hidden, *norms), scores),
        (num_rows, weight.shape[0]),
        constants,
    )
    return scores


def project(grad: Tensor, rows: Tensor, norms: Tensor) -> Tensor:
    """[n, D], the gradient of rows from that of their normalised forms, [n, D or more], which is overwritten
    where there is no more."""
    count, width = rows.shape[0], int(rows.shape[1])
    stride = int(grad.shape[1])
    out = grad if stride == width else grad.new_empty(count, width)
    constants = {"D": width, "STRIDE": stride, "BLOCK": FEW_ROWS, "BLOCK_D": padded_width(width)}
    launch_shortly(
        project_kernel,
        (grad.dtype, rows.dtype, width, stride),
        tiles_of(count, FEW_ROWS),
        (grad, rows, norms, out),
        (count,),
        constants | {"num_warps": 4},
    )
    return out


class Side(NamedTuple):
    """How a gradient kernel is cut into tiles: their rows, and how many there are, of the operand whose
    gradient it finds and of the other one."""

    rows: int
    others: int
    tiles: int
    other_tiles: int


class Marks(NamedTuple):
    """For the kernels of the two gradients; of no use where there are no targets."""

    hidden: Tensor
    weight: Tensor


def sides_of(operands: Operands, of_hidden: Any, of_weight: Any) -> tuple[Side, Side]:
    """For kernels of such sizes, `rows` and `others`."""
    rows, candidates = operands.hidden.shape[0], operands.weight.shape[0]
    return tuple(
        Side(sizes.rows, sizes.others, tiles_of(own, sizes.rows), tiles_of(other, sizes.others))
        for sizes, own, other in ((of_hidden, rows, candidates), (of_weight, candidates, rows))
    )


def upstream_of(
    operands: Operands, found: Found, grads: tuple[Tensor | None, Tensor | None], sides: tuple[Side, Side]
) -> tuple[Tensor, Tensor, Marks]:
    """What `upstream_kernel` writes: vectors, rows and marks."""
    target, num_rows = operands.target, operands.hidden.shape[0]
    padded = (tiles_of(num_rows, LARGEST_BLOCK) + 1) * LARGEST_BLOCK
    vectors = found.total.new_empty(3, padded)
    rows = found.total.new_empty(padded, dtype=torch.int32)
    of_hidden, of_weight = sides
    first, marks = 0, rows
    if target is not None:
        first = tiles_of(of_hidden.tiles * of_hidden.other_tiles, 16) * 16
        size = first + of_weight.tiles * of_weight.other_tiles
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
    launch_shortly(
        upstream_kernel,
        tuple(constants.values()),
        padded // LARGEST_BLOCK,
        (*or_else(vectors, *grads), found.maximum, *or_else(rows, target), vectors, rows, marks),
        (num_rows, operands.weight.shape[0], *strides, of_hidden.other_tiles, of_weight.other_tiles, first),
        constants,
    )
    return vectors, rows, Marks(marks, marks[first:])


def upstream_by_torch(
    operands: Operands, upstream: Upstream, sides: tuple[Side, Side]
) -> tuple[Tensor, Tensor, Marks]:
    """The same, of an upstream that is there already."""
    maximum, factor, of_target = upstream
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


def _marks(own: Tensor, other: Tensor, target: Tensor, side: Side) -> Tensor:
    """Of one side; the last is of no tile. `target` -1 for none."""
    size = side.tiles * side.other_tiles
    place = own // side.rows * side.other_tiles + other // side.others
    place = torch.where(target < 0, size, place)
    marks = torch.zeros(size + 1, dtype=torch.uint8, device=target.device)
    return marks.index_fill_(0, place, 1)


def row_constants(operands: Operands) -> dict[str, Any]:
    """The same for kernels that look at single candidates."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK": ROWS,
        "BLOCK_D": padded_width(width),
        "NORMED": operands.hidden_norms is not None,
        "BIASED": operands.bias is not None,
        "PRECISION": precision(),
        "num_warps": 4,
    }
