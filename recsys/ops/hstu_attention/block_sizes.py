"""Block sizes of the Triton kernels, chosen not to spill registers when compiled for sm_90a.

A test compiles every entry again (`tests/ops/hstu_attention/test_triton_compile.py`) and lists the one
exception, the widest heads in float32. The sizes for 16 bits without bias are the fastest on an H200 that
`scripts/tune_triton.py` has tried (`experiments/2026-11-22-gpu-triton`). Two lessons: use three stages, since
with two the kernel waits for a block right after requesting it; and use tiles of 64 rows where four programs
then fit into a multiprocessor and hide one another's waits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime.triton_support import block_width

CHOSEN_WITH = "3.6"
"""The Triton version whose code does not spill. Other versions run these sizes, too; 3.8 spills in one of
them."""


class Blocks(NamedTuple):
    """Block sizes and launch parameters of one kernel."""

    rows: int  # BLOCK_M, rows per block
    keys: int  # BLOCK_N, keys per block
    num_warps: int
    num_stages: int
    max_registers: int | None = None


FORWARD_32 = {(64, 4): Blocks(32, 32, 8, 1), (128, 4): Blocks(32, 16, 8, 1), (256, 4): Blocks(16, 16, 8, 1)}

BACKWARD_32 = FORWARD_32 | {(128, 4): Blocks(16, 16, 8, 1)}
"""Sizes in float32, as in `BLOCKS`."""

BLOCKS = {
    # (kernel, biased): {(head width in columns, bytes per element): sizes}
    ("forward", False): {
        (64, 2): Blocks(64, 64, 4, 3),
        (128, 2): Blocks(128, 64, 8, 3),
        (256, 2): Blocks(128, 32, 8, 3),
        **FORWARD_32,
    },
    # forward kernel with tensor descriptors
    ("described", False): {
        (64, 2): Blocks(64, 64, 4, 2),
        (128, 2): Blocks(128, 64, 8, 3),
        (256, 2): Blocks(128, 32, 8, 3),
    },
    ("forward", True): {
        (64, 2): Blocks(64, 64, 4, 3),
        (128, 2): Blocks(128, 32, 8, 3),
        (256, 2): Blocks(64, 32, 8, 2),
        **FORWARD_32,
    },
    # The packed kernels have 16 rows per warp (`keys` and `sums`: 16 keys). `described` and `rows` load by
    # descriptors, `any_rows` without them; `sums` is `keys` with the sums of the tables.
    ("packed_forward", True): {(64, 2): Blocks(64, 64, 4, 3, 168)},
    ("packed_described", True): {(64, 2): Blocks(64, 64, 4, 2, 128)},
    ("packed_keys", True): {(64, 2): Blocks(64, 64, 4, 3)},
    ("packed_rows", True): {(64, 2): Blocks(64, 64, 4, 3, 168)},
    ("packed_any_rows", True): {(64, 2): Blocks(64, 64, 4, 3)},
    ("packed_sums", True): {(64, 2): Blocks(64, 64, 4, 3)},
    # with a cache whose keys are summed in parts; not timed
    ("split", False): {
        (64, 2): Blocks(64, 64, 4, 3),
        (128, 2): Blocks(64, 64, 4, 3),
        (256, 2): Blocks(64, 32, 8, 3),
        **FORWARD_32,
    },
    ("split", True): {
        (64, 2): Blocks(64, 32, 4, 3),
        (128, 2): Blocks(64, 32, 8, 3),
        (256, 2): Blocks(32, 32, 8, 2),
        **FORWARD_32,
    },
    ("keys", False): {(64, 2): Blocks(64, 64, 4, 3), (128, 2): Blocks(64, 128, 8, 3), **BACKWARD_32},
    ("keys", True): {
        (64, 2): Blocks(32, 64, 4, 3),
        (128, 2): Blocks(16, 64, 8, 2),
        (256, 2): Blocks(32, 32, 8, 1),
        **BACKWARD_32,
    },
    ("grad_k", False): {(256, 2): Blocks(32, 128, 8, 2)},
    ("grad_v", False): {(256, 2): Blocks(32, 128, 8, 3)},
    ("rows", False): {
        (64, 2): Blocks(64, 64, 4, 3),
        (128, 2): Blocks(128, 64, 8, 3),
        (256, 2): Blocks(128, 32, 8, 2),
        **BACKWARD_32,
    },
    ("rows", True): {
        (64, 2): Blocks(64, 64, 4, 2),
        (128, 2): Blocks(32, 32, 4, 1),
        (256, 2): Blocks(32, 32, 8, 1),
        **BACKWARD_32,
    },
    # In 16 bits, 16 rows per warp: each sum is then in one thread, as the kernel assumes. Heads of 64: the
    # faster on an H200 of the two sizes that do not spill with any mask.
    ("tables", True): {
        (64, 2): Blocks(64, 32, 4, 2),
        (128, 2): Blocks(64, 16, 4, 2),
        (256, 2): Blocks(64, 8, 4, 1),
        (64, 4): Blocks(32, 16, 8, 1),
        (128, 4): Blocks(16, 8, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
}
"""Sizes by kernel and by the larger of the two head dimensions, at least 64, padded to a power of two."""

ROOMY = 200 * 1024
"""Bytes of shared memory that one program needs for `BLOCKS`; only data-center GPUs since Hopper have that
much."""

SMALL_BLOCKS = {
    ("forward", False): {
        (64, 2): Blocks(64, 64, 4, 3),
        (128, 2): Blocks(128, 32, 8, 2),
        (256, 2): Blocks(64, 32, 8, 2),
    },
    ("split", False): {(128, 2): Blocks(64, 32, 8, 2), (256, 2): Blocks(32, 32, 8, 1)},
    ("keys", False): {(64, 2): Blocks(32, 128, 8, 3), (128, 2): Blocks(32, 64, 8, 2)},
    ("grad_k", False): {(256, 2): Blocks(32, 64, 8, 1)},
    ("grad_v", False): {(256, 2): Blocks(32, 64, 8, 2)},
    ("rows", False): {
        (64, 2): Blocks(64, 32, 4, 3),
        (128, 2): Blocks(64, 32, 8, 2),
        (256, 2): Blocks(32, 32, 8, 1),
    },
}
"""Sizes for other GPUs, in place of those in `BLOCKS`: within 99 KB, no spills on sm_80 and sm_89. Not
timed."""


def blocks_of(
    kernel: str, dtype: torch.dtype, qk_dim: int, v_dim: int, biased: bool, roomy: bool = True
) -> Blocks:
    """Return the sizes for a kernel; `roomy`: whether the GPU has at least `ROOMY` bytes of shared memory.

    Kernels: forward (also with a cache), split (with a cache in parts), described (forward, by descriptors),
    rows, the names that `keys_kernels` returns, tables (with bias).
    """
    key = _width(qk_dim, v_dim), dtype.itemsize
    blocks = BLOCKS[kernel, biased][key]
    return blocks if roomy else SMALL_BLOCKS.get((kernel, biased), {}).get(key, blocks)


def can_pack(kernel: str, dtype: torch.dtype, qk_dim: int, v_dim: int) -> bool:
    """Return True if the kernel has a `packed_` form, which adds the bias by inline assembly."""
    return (_width(qk_dim, v_dim), dtype.itemsize) in BLOCKS.get((f"packed_{kernel}", True), {})


def keys_kernels(dtype: torch.dtype, qk_dim: int, v_dim: int, biased: bool) -> tuple[str, ...]:
    """Return the kernels that compute dK and dV: a single one for both, or one for each."""
    has_both = (_width(qk_dim, v_dim), dtype.itemsize) in BLOCKS["keys", biased]
    return ("keys",) if has_both else ("grad_v", "grad_k")


def _width(qk_dim: int, v_dim: int) -> int:
    return block_width(max(qk_dim, v_dim), least=64)


def blocks_for(kernel: str, q: Tensor, v: Tensor, problem: Problem) -> Blocks:
    """Return the block sizes for one kernel of a call."""
    biased = problem.bias is not None
    return blocks_of(kernel, q.dtype, int(q.shape[2]), int(v.shape[2]), biased, is_roomy(q.device))


@lru_cache(maxsize=16)
def is_roomy(device: torch.device) -> bool:
    """Return True if the tiles for Hopper fit. Also True on a CPU, which may be tracing for a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= ROOMY
