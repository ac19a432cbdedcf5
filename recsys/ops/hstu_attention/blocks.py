"""How the Triton kernels cut their work up: sizes found by compiling for sm_90a, none of which spills there.

A test compiles every entry again (`tests/ops/hstu_attention/test_triton_compile.py`); the widest heads in
float32 are the exception that it lists. What is fastest among those that fit is for `scripts/bench_ops.py` to
say, on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHOSEN_WITH = "3.6"
"""The Triton whose code does not spill. Others run these sizes too; 3.8 spills in one of them."""


class Blocks(NamedTuple):
    """Sizes for one kernel."""

    rows: int  # BLOCK_M
    keys: int  # BLOCK_N
    num_warps: int
    num_stages: int


BLOCKS = {
    # (kernel, biased): {(width of the heads, bytes of an element): sizes}
    ("forward", False): {
        (64, 2): Blocks(128, 64, 8, 3),
        (128, 2): Blocks(128, 64, 8, 3),
        (256, 2): Blocks(64, 32, 8, 2),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(32, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
    ("forward", True): {
        (64, 2): Blocks(128, 32, 8, 3),
        (128, 2): Blocks(128, 32, 8, 3),
        (256, 2): Blocks(64, 32, 8, 2),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(32, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
    ("keys", False): {
        (64, 2): Blocks(32, 128, 8, 2),
        (128, 2): Blocks(32, 64, 8, 2),
        (256, 2): Blocks(32, 32, 8, 2),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(16, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
    ("keys", True): {
        (64, 2): Blocks(32, 128, 8, 2),
        (128, 2): Blocks(16, 64, 8, 2),
        (256, 2): Blocks(32, 32, 8, 1),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(16, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
    ("keys_and_rows", False): {
        (64, 2): Blocks(32, 128, 8, 2),
        (128, 2): Blocks(32, 64, 8, 2),
        (256, 2): Blocks(16, 32, 8, 2),
    },
    ("rows", False): {
        (64, 2): Blocks(128, 64, 8, 2),
        (128, 2): Blocks(64, 64, 8, 2),
        (256, 2): Blocks(32, 32, 8, 2),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(16, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
    ("rows", True): {
        (64, 2): Blocks(64, 32, 8, 1),
        (128, 2): Blocks(32, 32, 4, 1),
        (256, 2): Blocks(32, 32, 8, 1),
        (64, 4): Blocks(32, 32, 8, 1),
        (128, 4): Blocks(16, 16, 8, 1),
        (256, 4): Blocks(16, 16, 8, 1),
    },
}
"""The width is the larger of the two head dimensions, at least 64, padded to a power of two."""


def blocks_of(kernel: str, dtype: torch.dtype, qk_dim: int, v_dim: int, biased: bool) -> Blocks:
    """The sizes for a kernel: forward (with a cache too), keys, keys_and_rows (16 bits, no bias) or rows."""
    return BLOCKS[kernel, biased][max(64, padded_dim(qk_dim), padded_dim(v_dim)), dtype.itemsize]


def padded_dim(dim: int) -> int:
    """The next power of two that a matrix instruction takes."""
    return max(16, 1 << (dim - 1).bit_length())
