"""The way to the Hopper kernel of a projection that goes through SiLU, and where it is taken.

This module needs Gluon, a part of Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.norm_linear.sm90_kernel import STRIP, STRIPS, projection_kernel
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.hopper_launch import launch, programs_for

COLUMNS, DEPTH, STAGES, WARPS = 256, 64, 3, 4
"""Of a tile, of a step; buffers; of a warp group."""

ROWS = STRIP.value * STRIPS.value
"""Of a tile."""

LEAST_ROWS = 1024
"""Of x; with fewer most processors would have no tile, and the launch takes the host longer than cuBLAS."""

LEAST_DEPTH = 512
"""Columns of x; with 256 cuBLAS and PyTorch's SiLU are faster (experiments/2026-11-22-gpu-stu)."""


class Activated(NamedTuple):
    """What `project` returns, [T, N] each."""

    before: Tensor
    active: Tensor


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `project` can multiply these, [T, K] and [N, K], and should."""
    fits = x.is_cuda and x.dtype.itemsize == 2 and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0
    worth = x.shape[0] >= LEAST_ROWS and x.shape[1] >= LEAST_DEPTH and weight.shape[0] >= COLUMNS
    return fits and worth


def project(x: Tensor, weight: Tensor, bias: Tensor) -> Activated:
    """`x @ weight^T + bias`, summed in float32, and SiLU of the sum; each is rounded once.

    Args:
        x: [T, K] in 16 bits. weight: [N, K], bias: [N], its dtype.
    """
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    made = Activated(*(torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device) for _ in range(2)))
    if num_rows == 0:
        return made
    across = -(-num_columns // COLUMNS)
    num_tiles = -(-num_rows // ROWS) * across
    rows = [with_loadable_rows(one.unsqueeze(1)) for one in (x, weight)]
    launch(
        projection_kernel,
        (x.dtype,),
        programs_for(x.device, num_tiles),
        (
            Boxes(rows[0], ROWS, DEPTH),
            Boxes(rows[1], COLUMNS, DEPTH),
            *(Boxes(one.unsqueeze(1), STRIP.value, COLUMNS) for one in made),
        ),
        (bias,),
        (num_rows, num_columns, num_tiles, across, -(-depth // DEPTH)),
        lambda: {"STAGES": STAGES, "num_warps": WARPS},
    )
    return made
