"""Launches the Hopper kernel for candidates on cached histories."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.cached.hopper_kernel import candidates_kernel
from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.hstu_attention.work_list import cached_work
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import STRIP
from recsys.ops.runtime.hopper_launch import launch, programs_for, zero_counter
from recsys.ops.runtime.triton_support import num_processors

WARPS = 4
"""Warps per strip."""


class CandidateSizes(NamedTuple):
    """Sizes of the kernel for one head width."""

    keys: int  # BLOCK_N, keys per block
    stages: int  # buffers for blocks of keys, and as many for values
    strips: int = 2  # strips of 64 rows per tile, one warp group each
    q_tiles: int = 2  # buffers for tiles of rows
    computing_registers: int = 240
    loading_registers: int = 24


SIZES = {64: CandidateSizes(128, 3), 128: CandidateSizes(128, 2)}
"""Sizes by head width, in columns."""

LARGE_SIZES = {64: CandidateSizes(64, 4, strips=4, computing_registers=112)}
"""Sizes, by head width, for so many candidates that tiles of twice as many rows still occupy the GPU: four
warp groups fill one another's gaps better than two."""


def sizes_for(dim: int, num_rows: int, num_heads: int, processors: int) -> CandidateSizes:
    """Returns the sizes with which the last processor finishes first, assuming full tiles and samples of
    equal length."""
    small, large = SIZES[dim], LARGE_SIZES.get(dim)
    if large is None:
        return small
    passes = [
        -(-num_rows * num_heads // (STRIP.value * sizes.strips * processors)) * sizes.strips
        for sizes in (small, large)
    ]
    return large if passes[1] <= passes[0] else small


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    problem: CachedProblem,
    sizes: CandidateSizes | None = None,
) -> Tensor:
    """Computes `hstu_attention_cached` [T, H, D] in 16 bits without bias, for new tokens that are all
    targets and see everything cached; the arguments have been validated. `sizes` overrides the defaults,
    for tests."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    total_len, num_heads, dim = q.shape
    if total_len == 0:
        return out
    if sizes is None:
        sizes = sizes_for(dim, total_len, num_heads, num_processors(q.device))
    if cache_k.shape[0] == 0:  # a tensor map needs an address, though nothing is read there
        cache_k, cache_v = k, v
    q, k, v, cache_k, cache_v = map(with_loadable_rows, (q, k, v, cache_k, cache_v))
    mask = problem.mask
    items = cached_work(mask, problem.layout, problem.cache_layout, STRIP.value * sizes.strips, sizes.keys)
    grouped = mask.target_group_size > 1
    launch(
        candidates_kernel,
        (q.dtype, dim, sizes, grouped),
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, STRIP.value, dim),
            Boxes(k, sizes.keys, dim),
            Boxes(v, sizes.keys, dim),
            Boxes(cache_k, sizes.keys, dim),
            Boxes(cache_v, sizes.keys, dim),
            Boxes(out, STRIP.value, dim),
        ),
        (items, zero_counter(q.device)),
        (
            items.shape[0],
            num_heads,
            *(tensor.stride(1) for tensor in (q, k, v, cache_k, cache_v)),
            0.5 * problem.alpha,
            1.0 / problem.scale_len,
            mask.target_group_size,
        ),
        lambda: {
            "D": dim,
            "BLOCK_N": sizes.keys,
            "STAGES": sizes.stages,
            "STRIPS": sizes.strips,
            "Q_TILES": sizes.q_tiles,
            "GROUPED": grouped,
            "COMPUTING_REGISTERS": sizes.computing_registers,
            "LOADING_REGISTERS": sizes.loading_registers,
            "num_warps": WARPS,
        },
    )
    return out
