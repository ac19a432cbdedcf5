"""What all launches of `linear_logp` share: ways to start a kernel, operands as kernels take them, parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.linear_logp.recompute import Operands
from recsys.ops.runtime import triton_support

try:
    from recsys.ops.runtime.hopper_launch import start as _start
except ImportError:  # another Triton
    _start = None

Launch = Callable[..., None]
"""`launch(kernel, key, programs, tensors, numbers, constants)`; `key` has all that the code depends on."""

LARGEST_BLOCK = 256
"""At least as many rows as any tile has."""

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


def prepared(operands: Operands) -> Operands:
    """As the kernels take them: contiguous matrices; what is of rows or candidates up to whole tiles."""
    hidden, weight, bias, scale, target, candidate_ids, target_ids, *norms = operands
    bias = None if bias is None else to_whole_tiles(bias.float())
    candidate_ids, target_ids, *norms = (
        None if one is None else to_whole_tiles(one) for one in (candidate_ids, target_ids, *norms)
    )
    target = None if target is None else target.contiguous()
    matrices = (hidden.contiguous(), weight.contiguous())
    return Operands(*matrices, bias, scale, target, candidate_ids, target_ids, *norms)


def to_whole_tiles(tensor: Tensor, fill: float = 0) -> Tensor:
    """[n] -> its numbers and `fill` to the end of any tile with one of them: loads need no bounds."""
    missing = -tensor.shape[0] % LARGEST_BLOCK + LARGEST_BLOCK
    return torch.nn.functional.pad(tensor, (0, missing), value=fill).contiguous()


def tiles_of(size: int, block: int) -> int:
    return (size + block - 1) // block


def or_else(instead: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Something to pass where there is no tensor."""
    return tuple(instead if tensor is None else tensor for tensor in tensors)


def padded_width(width: int) -> int:
    """Of a block of whole rows."""
    return max(16, 1 << (width - 1).bit_length())


def precision() -> str:
    """Of products of float32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Of the device."""
    return triton_support.num_processors(device)


@lru_cache(maxsize=1024)
def balanced(own_tiles: int, tiles: int, slots: int, most: int) -> tuple[int, int]:
    """Parts, `most` or fewer, and tiles a part, for which so many slots are done first."""

    def rounds(parts: int) -> int:
        per_part = -(-tiles // parts)
        return -(-own_tiles * -(-tiles // per_part) // slots) * (per_part + 1)

    parts = min(range(1, max(1, most) + 1), key=rounds)
    per_part = -(-tiles // parts)
    return -(-tiles // per_part), per_part
