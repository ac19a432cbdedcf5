"""Launches of the kernels of `linear_logp`: sizes of blocks, parts and their sums; library ops for graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from recsys.ops import triton_backend
from recsys.ops.linear_logp.recompute import Found, Gradients, Operands, Parts, Upstream, Wanted, is_row
from recsys.ops.linear_logp.triton_kernels import backward_kernel, forward_kernel
from recsys.ops.linear_logp.triton_rows import finish_kernel, target_kernel, upstream_kernel

try:
    from recsys.ops.hstu_attention.sm90_start import start as _start
except ImportError:  # another Triton
    _start = None

Launch = Callable[..., None]
"""`launch(kernel, key, programs, tensors, numbers, constants)`; `key` has all that the code depends on."""


LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """Sizes for a kernel."""

    rows: int  # of a program's own operand, BLOCK_M
    others: int  # BLOCK_N
    num_warps: int
    num_stages: int
    programs: int = 1
    """That run on a processor at a time."""


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
"""By kind of call and width: ids of 64 bits take registers, and so do products of float32, three for one."""

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
    },
}

LARGEST_BLOCK = 256
"""At least every number of rows in the tables."""

SPLIT_WIDTH = {2: 128, 4: 0}
"""By bytes of a number: up to here registers suffice for a second loop."""

MAX_PARTS = 64

PART_NUMBERS = 1 << 24
"""Most numbers in the gradients of all parts but one: 64 MiB of float32."""


def launch_shortly(
    kernel: Any,
    key: Hashable,
    programs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """As `Launch`: with little work on the host where that is known how."""
    if _start is None:
        kernel[(programs,)](*tensors, *numbers, **constants)
    else:
        _start(kernel, key, programs, (), tensors, numbers, lambda: constants)


def launch_traced(
    kernel: Any,
    key: Hashable,
    programs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """As `Launch`: for graphs."""
    wrap_triton(kernel)[(programs,)](*tensors, *numbers, **constants)


def launch_forward(operands: Operands, launch: Launch = launch_shortly) -> Parts:
    """The arguments have been validated and are not empty."""
    operands = prepared(operands)
    return parts_of_sums(operands, *launch_sums(operands, launch), launch)


def parts_of_sums(
    operands: Operands, maxima: Tensor, totals: Tensor, launch: Launch = launch_shortly
) -> Parts:
    """From [parts, N], the operands `prepared`."""
    best = maxima.amax(0)
    finite = torch.where(best == -torch.inf, 0, best)
    total = (totals * (maxima - finite).exp()).sum(0)
    return Parts(best, total, target_scores(operands, launch))


def whole_forward(operands: Operands, ignore_index: int | None) -> Found:
    """The same and what is made of it, in two launches."""
    operands = prepared(operands)
    maxima, totals = launch_sums(operands, launch_shortly)
    return finished(operands, maxima, totals, ignore_index)


def finished(operands: Operands, maxima: Tensor, totals: Tensor, ignore_index: int | None) -> Found:
    """From [parts, N], the operands `prepared`."""
    hidden, weight, bias, scale, target, _, _, *norms = operands
    parts, num_rows = maxima.shape
    found = scale.new_empty(4, num_rows)
    constants = row_constants(operands)
    launch_shortly(
        finish_kernel,
        (hidden.dtype, *constants.values()),
        _tiles(num_rows, constants["BLOCK"]),
        (hidden, weight, *_or(hidden, bias), scale, *_or(hidden, target, *norms), maxima, totals, found),
        (num_rows, weight.shape[0], parts, ignore_index or 0),
        constants | {"HAS_TARGET": target is not None},
    )
    return Found(*found.unbind(0))


def launch_sums(operands: Operands, launch: Launch) -> tuple[Tensor, Tensor]:
    """[parts, N] each: maximum and sum over parts of the candidates."""
    hidden, weight, bias, scale, *rest = operands
    num_rows, num_candidates = hidden.shape[0], weight.shape[0]
    blocks = blocks_of(operands, FORWARD)
    row_tiles, tiles = _tiles(num_rows, blocks.rows), _tiles(num_candidates, blocks.others)
    parts, per_part = parts_of(row_tiles, tiles, blocks, hidden.device, MAX_PARTS)
    maxima, totals = (scale.new_empty(parts, num_rows) for _ in range(2))
    constants = constants_of(operands, blocks)
    launch(
        forward_kernel,
        (hidden.dtype, *constants.values()),
        row_tiles * parts,
        (hidden, weight, *_or(hidden, bias), scale, *_or(hidden, *rest), maxima, totals),
        (num_rows, num_candidates, per_part),
        constants,
    )
    return maxima, totals


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
        _tiles(num_rows, constants["BLOCK"]),
        (hidden, weight, *_or(hidden, bias), scale, target, *_or(hidden, *norms), scores),
        (num_rows, weight.shape[0]),
        constants,
    )
    return scores


def launch_backward(
    operands: Operands, upstream: Upstream, wanted: Wanted, launch: Launch = launch_shortly
) -> Gradients:
    """The arguments have been validated and are not empty."""
    operands = prepared(operands)
    return launch_gradients(
        operands, *upstream_by_torch(operands, upstream, _sides(operands)), wanted, launch
    )


def whole_backward(
    operands: Operands, found: Found, grad_logp: Tensor | None, grad_lse: Tensor | None, wanted: Wanted
) -> Gradients:
    """The same from the gradients of the outputs, with one launch before the large ones."""
    operands = prepared(operands)
    by_row = upstream_of(operands, found, (grad_logp, grad_lse), _sides(operands))
    return launch_gradients(operands, *by_row, wanted, launch_shortly)


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
        Side(sizes.rows, sizes.others, _tiles(own, sizes.rows), _tiles(other, sizes.others))
        for sizes, own, other in ((of_hidden, rows, candidates), (of_weight, candidates, rows))
    )


def _sides(operands: Operands) -> tuple[Side, Side]:
    return sides_of(operands, blocks_of(operands, OF_HIDDEN), blocks_of(operands, OF_WEIGHT))


def upstream_of(
    operands: Operands, found: Found, grads: tuple[Tensor | None, Tensor | None], sides: tuple[Side, Side]
) -> tuple[Tensor, Tensor, Marks]:
    """What `upstream_kernel` writes: vectors, rows and marks."""
    target, num_rows = operands.target, operands.hidden.shape[0]
    padded = (_tiles(num_rows, LARGEST_BLOCK) + 1) * LARGEST_BLOCK
    vectors = found.total.new_empty(3, padded)
    rows = found.total.new_empty(padded, dtype=torch.int32)
    of_hidden, of_weight = sides
    first, marks = 0, rows
    if target is not None:
        first = _tiles(of_hidden.tiles * of_hidden.other_tiles, 16) * 16
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
        (*_or(vectors, *grads), found.maximum, *_or(rows, target), vectors, rows, marks),
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
    padded = (_to_whole_tiles(top, torch.inf), _to_whole_tiles(sign), _to_whole_tiles(of_target))
    vectors = torch.stack(padded)
    if (target := operands.target) is None:
        return vectors, vectors, Marks(vectors, vectors)
    target = torch.where(is_row(target, operands.weight.shape[0]), target, -1)
    row = torch.arange(target.shape[0], device=target.device)
    marks = Marks(_marks(row, target, target, sides[0]), _marks(target, row, target, sides[1]))
    return vectors, _to_whole_tiles(target.int(), -1), marks


def _marks(own: Tensor, other: Tensor, target: Tensor, side: Side) -> Tensor:
    """Of one side; the last is of no tile. `target` -1 for none."""
    size = side.tiles * side.other_tiles
    place = own // side.rows * side.other_tiles + other // side.others
    place = torch.where(target < 0, size, place)
    marks = torch.zeros(size + 1, dtype=torch.uint8, device=target.device)
    return marks.index_fill_(0, place, 1)


def launch_gradients(
    operands: Operands, vectors: Tensor, rows: Tensor, marks: Marks, wanted: Wanted, launch: Launch
) -> Gradients:
    """The operands `prepared`; the others as in `upstream_kernel`."""
    grad_hidden = grad_weight = grad_bias = grad_scale = None
    if wanted.hidden or wanted.scale:
        side = (operands, vectors, rows, marks.hidden, launch)
        grad_hidden, _, grad_scale = _launch_side(*side, of_weight=False, with_scale=wanted.scale)
    if wanted.weight or wanted.bias:
        side = (operands, vectors, rows, marks.weight, launch)
        grad_weight, grad_bias, _ = _launch_side(*side, of_weight=True, with_bias=wanted.bias)
    return Gradients(
        grad_hidden if wanted.hidden else None, grad_weight if wanted.weight else None, grad_bias, grad_scale
    )


def _launch_side(
    operands: Operands,
    vectors: Tensor,
    rows: Tensor,
    marks: Tensor,
    launch: Launch,
    *,
    of_weight: bool,
    with_bias: bool = False,
    with_scale: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of hidden, float32, or of the weight, in its type; of the bias; of the scale."""
    hidden, weight, bias, scale, _, candidate_ids, target_ids, *norms = operands
    own, other = (weight, hidden) if of_weight else (hidden, weight)
    num_own, width = own.shape[0], int(own.shape[1])
    blocks = blocks_of(operands, OF_WEIGHT if of_weight else OF_HIDDEN)
    own_tiles, tiles = _tiles(num_own, blocks.rows), _tiles(other.shape[0], blocks.others)
    most = min(MAX_PARTS, 1 + PART_NUMBERS // (num_own * width))
    parts, per_part = parts_of(own_tiles, tiles, blocks, own.device, most)
    in_place = of_weight and not _is_split(parts)
    grad = own.new_empty(parts, num_own, width, dtype=own.dtype if in_place else scale.dtype)
    grad_bias = scale.new_empty(parts, num_own) if with_bias else grad
    grad_scale = scale.new_empty(parts, num_own) if with_scale else grad
    constants = constants_of(operands, blocks) | {
        "OF_WEIGHT": of_weight,
        "WITH_BIAS": with_bias,
        "WITH_SCALE": with_scale,
    }
    own_norms, other_norms = reversed(norms) if of_weight else norms
    launch(
        backward_kernel,
        (hidden.dtype, in_place, *constants.values()),
        own_tiles * parts,
        (
            *(own, other, *_or(own, bias), scale, rows),
            *_or(own, candidate_ids, target_ids, own_norms, other_norms),
            *(*vectors.unbind(0), marks, grad, grad_bias, grad_scale),
        ),
        (num_own, other.shape[0], per_part),
        constants,
    )
    summed = grad.sum(0) if _is_split(parts) else grad[0]
    return (
        summed.to(own.dtype) if of_weight else summed,
        grad_bias.sum(0) if with_bias else None,
        grad_scale.sum().reshape(1) if with_scale else None,
    )


def _is_split(parts: int) -> bool:
    """False for one part. In a traced graph the number may be unknown: then it is taken to be several."""
    return not isinstance(parts, int) or parts > 1


def parts_of(own_tiles: int, tiles: int, blocks: Blocks, device: torch.device, most: int) -> tuple[int, int]:
    """Into how many parts the other operand is cut, and how many tiles each has at most.

    As many as let the processors work to the end; a traced graph, in which sizes are unknown, takes four.
    """
    if isinstance(own_tiles, int) and isinstance(tiles, int) and isinstance(most, int):
        return balanced(own_tiles, tiles, processors(device) * blocks.programs, min(most, tiles))
    per_part = (tiles + 3) // 4
    return (tiles + per_part - 1) // per_part, per_part


@lru_cache(maxsize=1024)
def balanced(own_tiles: int, tiles: int, slots: int, most: int) -> tuple[int, int]:
    """Parts, `most` or fewer, and tiles a part, for which so many slots are done first."""

    def rounds(parts: int) -> int:
        per_part = -(-tiles // parts)
        return -(-own_tiles * -(-tiles // per_part) // slots) * (per_part + 1)

    parts = min(range(1, max(1, most) + 1), key=rounds)
    per_part = -(-tiles // parts)
    return -(-tiles // per_part), per_part


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Of the device."""
    return triton_backend.num_processors(device)


def blocks_of(operands: Operands, table: dict[str, dict[int, Blocks]]) -> Blocks:
    """From `FORWARD`, `OF_HIDDEN` or `OF_WEIGHT`."""
    kind = "16 bits"
    if operands.candidate_ids is not None or operands.hidden_norms is not None:
        kind = "16 bits, ids"
    if operands.hidden.dtype == torch.float32:
        kind = "32 bits"
    return table[kind][max(64, padded_width(int(operands.hidden.shape[1])))]


def padded_width(width: int) -> int:
    """Of a block of whole rows."""
    return max(16, 1 << (width - 1).bit_length())


def precision() -> str:
    """Of products of float32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def constants_of(operands: Operands, blocks: Blocks) -> dict[str, Any]:
    """What the kernels are compiled for, by the names of their parameters."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.others,
        "BLOCK_D": padded_width(width),
        "NORMED": operands.hidden_norms is not None,
        "BIASED": operands.bias is not None,
        "HAS_TARGET": operands.target is not None,
        "HAS_IDS": operands.candidate_ids is not None,
        "PRECISION": precision(),
        "SPLIT": width <= SPLIT_WIDTH[operands.hidden.dtype.itemsize],
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def row_constants(operands: Operands) -> dict[str, Any]:
    """The same for kernels that look at single candidates."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK": min(64, blocks_of(operands, FORWARD).rows),
        "BLOCK_D": padded_width(width),
        "NORMED": operands.hidden_norms is not None,
        "BIASED": operands.bias is not None,
        "PRECISION": precision(),
        "num_warps": 4,
    }


def _tiles(size: int, block: int) -> int:
    return (size + block - 1) // block


def _or(instead: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Something to pass where there is no tensor."""
    return tuple(instead if tensor is None else tensor for tensor in tensors)


def prepared(operands: Operands) -> Operands:
    """As the kernels take them: contiguous matrices; what is of rows or candidates up to whole tiles."""
    hidden, weight, bias, scale, target, candidate_ids, target_ids, *norms = operands
    bias = None if bias is None else _to_whole_tiles(bias.float())
    candidate_ids, target_ids, *norms = (
        None if one is None else _to_whole_tiles(one) for one in (candidate_ids, target_ids, *norms)
    )
    target = None if target is None else target.contiguous()
    matrices = (hidden.contiguous(), weight.contiguous())
    return Operands(*matrices, bias, scale, target, candidate_ids, target_ids, *norms)


def _to_whole_tiles(tensor: Tensor, fill: float = 0) -> Tensor:
    """[n] -> its numbers and `fill` to the end of any tile with one of them: loads need no bounds."""
    missing = -tensor.shape[0] % LARGEST_BLOCK + LARGEST_BLOCK
    return torch.nn.functional.pad(tensor, (0, missing), value=fill).contiguous()


@triton_op("recsys::linear_logp_triton", mutates_args=())
def forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    target: Tensor | None,
    candidate_ids: Tensor | None,
    target_ids: Tensor | None,
    hidden_norms: Tensor | None,
    weight_norms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_forward` for traced graphs."""
    operands = Operands(
        hidden, weight, bias, scale, target, candidate_ids, target_ids, hidden_norms, weight_norms
    )
    return tuple(launch_forward(operands, launch_traced))


@triton_op("recsys::linear_logp_triton_backward", mutates_args=())
def backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    target: Tensor | None,
    candidate_ids: Tensor | None,
    target_ids: Tensor | None,
    hidden_norms: Tensor | None,
    weight_norms: Tensor | None,
    maximum: Tensor,
    factor: Tensor,
    of_target: Tensor,
    wanted: list[bool],
) -> list[Tensor]:
    """`launch_backward` for traced graphs: the gradients that are `wanted`."""
    operands = Operands(
        hidden, weight, bias, scale, target, candidate_ids, target_ids, hidden_norms, weight_norms
    )
    upstream = Upstream(maximum, factor, of_target)
    found = launch_backward(operands, upstream, Wanted(*wanted), launch_traced)
    return [gradient for gradient in found if gradient is not None]
