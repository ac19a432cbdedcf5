"""Shared parts of the `linear_logp` launches: padded operands and splits into parts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from recsys.ops.linear_logp.recompute import Operands

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
