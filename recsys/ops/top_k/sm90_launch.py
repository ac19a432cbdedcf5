"""Launch of the Hopper kernel of `top_k`; the other kernels are those of the Triton backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from recsys.ops.runtime.triton_support import num_processors
from recsys.ops.top_k import TopK, triton_launch
from recsys.ops.top_k.sm90_kernel import STRIP, coarse_kernel

WARPS = 4
"""Of a warp group."""


class Sizes(NamedTuple):
    """Of the kernel for one width."""

    group: int  # items of which only the largest score is kept
    stages: int  # buffers for groups
    strips: int  # warp groups that compute
    halves: int  # strips of 64 queries that each of them has
    computing_registers: int
    loading_registers: int

    @property
    def queries(self) -> int:
        """Of a unit."""
        return STRIP.value * self.strips * self.halves


SIZES = {
    64: Sizes(128, 12, 2, 2, 240, 24),
    128: Sizes(128, 6, 2, 2, 240, 24),
    256: Sizes(128, 3, 3, 1, 160, 24),
    512: Sizes(64, 3, 2, 1, 240, 24),
}
"""By padded width."""


def run(
    queries: Tensor,
    items: Tensor,
    k: int,
    removed: Tensor,
    removed_lengths: Tensor,
    sizes: Sizes | None = None,
) -> TopK:
    """`top_k`; the arguments have been validated."""
    sizes = sizes or SIZES[triton_launch.padded_width(int(queries.shape[1]))]

    def coarse(rows: Tensor, items: Tensor, maxima: Tensor, num_groups: int) -> None:
        launch_coarse(rows, items, maxima, num_groups, sizes)

    product = triton_launch.Product(coarse, sizes.group)
    return triton_launch.run(queries, items, k, removed, removed_lengths, product)


def launch_coarse(rows: Tensor, items: Tensor, maxima: Tensor, num_groups: int, sizes: Sizes) -> None:
    """`coarse_kernel`."""
    width = triton_launch.padded_width(rows.shape[1])
    tiles = -(-len(rows) // sizes.queries)
    per_part = triton_launch.part_of(tiles, num_groups, items.device)
    units = tiles * -(-num_groups // per_part)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    coarse_kernel[(min(units, num_processors(items.device)),)](
        TensorDescriptor.from_tensor(items, [sizes.group, width], layout),
        rows,
        maxima,
        units,
        tiles,
        len(rows),
        num_groups,
        per_part,
        rows.stride(0),
        maxima.stride(0),
        **constants_of(width, sizes),
        num_warps=WARPS,
    )


def constants_of(width: int, sizes: Sizes) -> dict[str, int]:
    """What the kernel is compiled for, by the names of its parameters."""
    return {
        "D": width,
        "GROUP": sizes.group,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "HALVES": sizes.halves,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
    }
