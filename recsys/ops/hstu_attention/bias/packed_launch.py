"""Decide when kernels add the bias by the inline assembly of `ptx`; provide their constants and sums."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.bias import launch as bias_launch
from recsys.ops.hstu_attention.bias import ptx as ptx
from recsys.ops.hstu_attention.bias.packed import finish_kernel
from recsys.ops.hstu_attention.triton.block_sizes import can_pack
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.descriptors import Boxes
from recsys.ops.runtime.launch import launch, launch_specialized

DYNAMIC_SHARED_BYTES = ctypes.c_int(8)
"""The driver's attribute number CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

COPIES = 8
"""Copies of the sums that many programs add to, so that they seldom wait for one another. A power of two."""

FINISH_BLOCK = 256
"""Table entries that one program finishes."""


class Sums(NamedTuple):
    """Partial gradients of the bias tables, float32: twice the gradients, without the factor 1 /
    scale_len."""

    by_distance: Tensor  # [COPIES, H, 2 * reach + 1], from distance -reach on
    by_bucket: Tensor  # [COPIES, H, num_buckets]


def is_packed(kernel: str, q: Tensor, v: Tensor, bias: RelativeBias | None) -> bool:
    """Return True if this kernel uses the inline assembly: on Hopper, for the sizes and buckets that it
    supports."""
    if bias is None or not _is_hopper(q.device):
        return False
    has_sizes = can_pack(kernel, q.dtype, int(q.shape[2]), int(v.shape[2]))
    return has_sizes and bias_launch.can_pack(bias)


@lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launch_with_declared_memory(
    kernel: Any,
    programs: int,
    arguments: Sequence[Boxes | Tensor | int | float],
    compiled_for: dict[str, Any],
    describe: Callable[[Boxes], Any],
) -> None:
    """Start `kernel[(programs,)](*arguments, **compiled_for)`, whose assembly declares shared memory.

    Triton does not know of that memory, and requests more than 48 KB only if its own memory needs more.
    """

    def again() -> None:
        launch_specialized(kernel, programs, arguments, compiled_for, describe)

    try:
        again()
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
        described = [
            describe(argument) if isinstance(argument, Boxes) else argument for argument in arguments
        ]
        compiled = kernel.warmup(*described, grid=(programs,), **compiled_for)
        of_function = (
            ctypes.c_void_p(compiled.function),
            DYNAMIC_SHARED_BYTES,
            ctypes.c_int(compiled.metadata.shared),
        )
        if ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(*of_function) != 0:
            raise
        again()


def zero_sums(q: Tensor, longest: int, bias: RelativeBias) -> Sums:
    """Return zero-initialized sums for samples of at most `longest` tokens."""
    sizes = 2 * (longest + bias_launch.LARGEST_BLOCK) + 1, int(bias.time_table.shape[-1])
    rows = COPIES * int(q.shape[1])
    both = q.new_zeros(rows * sum(sizes), dtype=torch.float32)
    by_distance, by_bucket = both.split([rows * size for size in sizes])
    return Sums(by_distance.view(COPIES, -1, sizes[0]), by_bucket.view(COPIES, -1, sizes[1]))


def finished(sums: Sums, scale_len: float, bias: RelativeBias) -> tuple[Tensor, Tensor]:
    """Return the gradients of both tables from their sums."""
    tables = bias.position_table, bias.time_table
    grads = [torch.empty(table.shape, dtype=table.dtype, device=table.device) for table in tables]
    sizes = [int(table.shape[-1]) for table in tables]
    shared = [table.dim() == 1 for table in tables]
    num_heads, block = sums.by_distance.shape[1], FINISH_BLOCK
    parts = -(-max(sizes) // block)
    numbers = *sizes, sums.by_distance.shape[2] // 2, num_heads, parts, 0.5 / scale_len
    compiled_for = {"SHARED_POSITIONS": shared[0], "SHARED_TIMES": shared[1]}
    compiled_for |= {"COPIES": COPIES, "BLOCK": block}
    launch(finish_kernel, parts * (1 if all(shared) else num_heads), (*sums, *grads), numbers, compiled_for)
    return grads[0], grads[1]


def bias_constants(packed: bool, rows_first: bool, sums: bool = False) -> dict[str, str]:
    """Return the assembly that adds the bias to blocks, [rows, keys] if `rows_first` or else [keys, rows],
    and the assembly to run before the first block; both are empty if not `packed`. sums: the kernel also has
    `tables_constants`."""
    if not packed:
        return dict.fromkeys(("BIAS_TEXT", "BIAS_CONSTRAINTS", "BEGIN_TEXT"), "")
    text, constraints = _add_bias(rows_first)
    return {"BIAS_TEXT": text, "BIAS_CONSTRAINTS": constraints, "BEGIN_TEXT": _begin(sums)}


def tables_constants(sums: Sums | None) -> dict[str, str]:
    """Return the assembly that adds blocks [keys, rows] to the sums, and the assembly to run after the last
    block; both are empty without sums."""
    if sums is None:
        return dict.fromkeys(("TABLES_TEXT", "TABLES_CONSTRAINTS", "FINISH_TEXT"), "")
    text, constraints = _add_to_tables()
    return {"TABLES_TEXT": text, "TABLES_CONSTRAINTS": constraints, "FINISH_TEXT": _finish_sums()}


_add_bias = lru_cache(maxsize=2)(ptx.add_bias)
_begin = lru_cache(maxsize=2)(ptx.begin)
_add_to_tables = lru_cache(maxsize=1)(ptx.add_to_tables)
_finish_sums = lru_cache(maxsize=1)(ptx.finish_sums)
