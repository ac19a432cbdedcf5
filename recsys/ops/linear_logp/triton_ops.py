"""Launches of the kernels of `linear_logp`: sizes of blocks, parts and their sums; library ops for graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from recsys.ops.linear_logp.recompute import Gradients, Operands, Parts, Upstream, Wanted
from recsys.ops.linear_logp.triton_kernels import backward_kernel, forward_kernel, target_kernel
from recsys.ops.triton_backend import num_processors

Wrap = Callable[[Any], Any]


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
        64: Blocks(128, 128, 8, 3, programs=2),
        128: Blocks(128, 128, 8, 2, programs=2),
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

BACKWARD = {
    "16 bits": {
        64: Blocks(128, 128, 8, 3),
        128: Blocks(128, 64, 8, 3),
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

LARGEST_BLOCK = 256
"""A multiple of every number of rows in the tables."""

SPLIT_WIDTH = {2: 128, 4: 0}
"""By bytes of a number: up to here registers suffice for a second loop."""

MAX_PARTS = 64

PART_NUMBERS = 1 << 24
"""Most numbers in the gradients of all parts but one: 64 MiB of float32."""


def launch_forward(operands: Operands, wrap: Wrap = lambda kernel: kernel) -> Parts:
    """The arguments have been validated and are not empty."""
    operands = _prepared(operands)
    hidden, weight, bias, scale, target, candidate_ids, target_ids = operands
    num_rows, num_candidates = hidden.shape[0], weight.shape[0]
    blocks = blocks_of(operands, FORWARD)
    row_tiles, tiles = _tiles(num_rows, blocks.rows), _tiles(num_candidates, blocks.others)
    parts, per_part = parts_of(row_tiles, tiles, blocks, hidden.device, MAX_PARTS)
    maximum, total = (scale.new_empty(parts, num_rows) for _ in range(2))
    wrap(forward_kernel)[(row_tiles * parts,)](
        hidden,
        weight,
        hidden if bias is None else bias,
        scale,
        hidden if target is None else target,
        hidden if candidate_ids is None else candidate_ids,
        hidden if target_ids is None else target_ids,
        maximum,
        total,
        num_rows,
        num_candidates,
        per_part,
        hidden.stride(0),
        weight.stride(0),
        **constants(operands, blocks),
    )
    best = maximum.amax(0)
    finite = torch.where(best == -torch.inf, 0, best)
    total = (total * (maximum - finite).exp()).sum(0)
    return Parts(best, total, _target_scores(operands, wrap))


def _target_scores(operands: Operands, wrap: Wrap) -> Tensor:
    hidden, weight, bias, scale, target, *_ = operands
    num_rows, width = hidden.shape[0], int(hidden.shape[1])
    scores = scale.new_empty(num_rows)
    if target is None:
        return scores.zero_()
    block = min(64, blocks_of(operands, FORWARD).rows)
    wrap(target_kernel)[(_tiles(num_rows, block),)](
        hidden,
        weight,
        hidden if bias is None else bias,
        scale,
        target,
        scores,
        num_rows,
        hidden.stride(0),
        weight.stride(0),
        D=width,
        BLOCK=block,
        BLOCK_D=padded_width(width),
        BIASED=bias is not None,
        PRECISION=precision(),
        num_warps=4,
    )
    return scores


def launch_backward(
    operands: Operands, upstream: Upstream, wanted: Wanted, wrap: Wrap = lambda kernel: kernel
) -> Gradients:
    """The arguments have been validated and are not empty."""
    operands = _prepared(operands)
    maximum, factor, of_target = upstream
    upstream = Upstream(
        _to_whole_tiles(maximum * math.log2(math.e), torch.inf),
        _to_whole_tiles(factor),
        _to_whole_tiles(of_target),
    )
    grad_hidden = grad_weight = grad_bias = None
    if wanted.hidden:
        grad_hidden = _launch_side(operands, upstream, wrap, of_weight=False, with_bias=False)[0]
    if wanted.weight or wanted.bias:
        grad_weight, grad_bias = _launch_side(operands, upstream, wrap, of_weight=True, with_bias=wanted.bias)
    return Gradients(grad_hidden, grad_weight if wanted.weight else None, grad_bias)


def _launch_side(
    operands: Operands, upstream: Upstream, wrap: Wrap, *, of_weight: bool, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden, float32, or of the weight, in its type, and of the bias."""
    hidden, weight, bias, scale, target, candidate_ids, target_ids = operands
    own, other = (weight, hidden) if of_weight else (hidden, weight)
    num_own, width = own.shape[0], int(own.shape[1])
    blocks = blocks_of(operands, BACKWARD)
    own_tiles, tiles = _tiles(num_own, blocks.rows), _tiles(other.shape[0], blocks.others)
    most = min(MAX_PARTS, 1 + PART_NUMBERS // (num_own * width))
    parts, per_part = parts_of(own_tiles, tiles, blocks, own.device, most)
    in_place = of_weight and not _is_split(parts)
    grad = own.new_empty(parts, num_own, width, dtype=own.dtype if in_place else scale.dtype)
    grad_bias = scale.new_empty(parts, num_own) if with_bias else grad
    marks = (
        grad
        if target is None
        else _marks(target[: hidden.shape[0]], own_tiles, tiles, blocks, of_weight=of_weight)
    )
    wrap(backward_kernel)[(own_tiles * parts,)](
        own,
        other,
        hidden if bias is None else bias,
        scale,
        hidden if target is None else target,
        hidden if candidate_ids is None else candidate_ids,
        hidden if target_ids is None else target_ids,
        *upstream,
        marks,
        grad,
        grad_bias,
        num_own,
        other.shape[0],
        per_part,
        own.stride(0),
        other.stride(0),
        OF_WEIGHT=of_weight,
        WITH_BIAS=with_bias,
        **constants(operands, blocks),
    )
    summed = grad.sum(0) if _is_split(parts) else grad[0]
    return summed.to(own.dtype) if of_weight else summed, grad_bias.sum(0) if with_bias else None


def _is_split(parts: int) -> bool:
    """False for one part. In a traced graph the number may be unknown: then it is taken to be several."""
    return not isinstance(parts, int) or parts > 1


def _marks(target: Tensor, own_tiles: int, tiles: int, blocks: Blocks, *, of_weight: bool) -> Tensor:
    """uint8 [own_tiles * tiles + 1], 1 for a tile of scores with a target in it. The last is of no tile."""
    row = torch.arange(target.shape[0], device=target.device)
    own, other = (target, row) if of_weight else (row, target)
    place = own // blocks.rows * tiles + other // blocks.others
    place = torch.where(target < 0, own_tiles * tiles, place)
    marks = torch.zeros(own_tiles * tiles + 1, dtype=torch.uint8, device=target.device)
    return marks.index_fill_(0, place, 1)


def parts_of(own_tiles: int, tiles: int, blocks: Blocks, device: torch.device, most: int) -> tuple[int, int]:
    """Into how many parts the other operand is cut, and how many tiles each has at most.

    As many as let the processors work to the end; a traced graph, in which sizes are unknown, takes four.
    """
    slots = num_processors(device) * blocks.programs
    if isinstance(own_tiles, int) and isinstance(tiles, int) and isinstance(most, int):
        most = max(1, min(most, tiles))

        def rounds(parts: int) -> float:
            per_part = -(-tiles // parts)
            return -(-own_tiles * -(-tiles // per_part) // slots) * (per_part + 1)

        parts = min(range(1, most + 1), key=rounds)
        per_part = -(-tiles // parts)
        return -(-tiles // per_part), per_part
    per_part = (tiles + 3) // 4
    return (tiles + per_part - 1) // per_part, per_part


def blocks_of(operands: Operands, table: dict[str, dict[int, Blocks]]) -> Blocks:
    """From `FORWARD` or `BACKWARD`."""
    kind = "16 bits" if operands.candidate_ids is None else "16 bits, ids"
    if operands.hidden.dtype == torch.float32:
        kind = "32 bits"
    return table[kind][max(64, padded_width(int(operands.hidden.shape[1])))]


def padded_width(width: int) -> int:
    """Of a block of whole rows."""
    return max(16, 1 << (width - 1).bit_length())


def precision() -> str:
    """Of products of float32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def constants(operands: Operands, blocks: Blocks) -> dict[str, Any]:
    """What the kernels are compiled for, by the names of their parameters."""
    width = int(operands.hidden.shape[1])
    return {
        "D": width,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.others,
        "BLOCK_D": padded_width(width),
        "BIASED": operands.bias is not None,
        "HAS_TARGET": operands.target is not None,
        "HAS_IDS": operands.candidate_ids is not None,
        "PRECISION": precision(),
        "SPLIT": width <= SPLIT_WIDTH[operands.hidden.dtype.itemsize],
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _tiles(size: int, block: int) -> int:
    return (size + block - 1) // block


def _prepared(operands: Operands) -> Operands:
    """As the kernels take them: any stride between rows of the two matrices; the others up to whole tiles."""
    hidden, weight, bias, scale, target, candidate_ids, target_ids = operands
    hidden, weight = (one if one.stride(1) == 1 else one.contiguous() for one in (hidden, weight))
    bias = None if bias is None else _to_whole_tiles(bias.float())
    ids = (None if one is None else _to_whole_tiles(one) for one in (target, candidate_ids, target_ids))
    return Operands(hidden, weight, bias, scale, *ids)


def _to_whole_tiles(tensor: Tensor, fill: float = 0) -> Tensor:
    """[n] -> its numbers and `fill` up to a multiple of the largest block: loads need no bounds."""
    missing = -tensor.shape[0] % LARGEST_BLOCK
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_forward` for traced graphs."""
    operands = Operands(hidden, weight, bias, scale, target, candidate_ids, target_ids)
    return tuple(launch_forward(operands, wrap_triton))


@triton_op("recsys::linear_logp_triton_backward", mutates_args=())
def backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    target: Tensor | None,
    candidate_ids: Tensor | None,
    target_ids: Tensor | None,
    maximum: Tensor,
    factor: Tensor,
    of_target: Tensor,
    wanted: list[bool],
) -> list[Tensor]:
    """`launch_backward` for traced graphs: the gradients that are `wanted`."""
    operands = Operands(hidden, weight, bias, scale, target, candidate_ids, target_ids)
    upstream = Upstream(maximum, factor, of_target)
    found = launch_backward(operands, upstream, Wanted(*wanted), wrap_triton)
    return [gradient for gradient in found if gradient is not None]
