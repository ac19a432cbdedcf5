"""Launches the Hopper gradients that come from two kernels, dK and dV by tiles of keys, dQ by tiles of rows.

Seven products instead of five, but no program adds to what another has written: the bits are the same every
time, and no sum in float32 goes through memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.sm90_backward_rows import STRIPS, rows_kernel
from recsys.ops.hstu_attention.sm90_backward_wide import wide_keys_kernel
from recsys.ops.hstu_attention.sm90_forward import STRIP
from recsys.ops.hstu_attention.sm90_launch import WARPS, rules, scalars, section_of
from recsys.ops.hstu_attention.sm90_start import Boxes, programs_for, start, with_loadable_rows
from recsys.ops.hstu_attention.triton_launch import Gradients, Problem
from recsys.ops.hstu_attention.work_list import key_work, row_work


class Sizes(NamedTuple):
    """Of both kernels for one width of the heads."""

    rows: int  # of a block, for tiles of keys
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    keys: int  # of a block, for tiles of rows
    k_stages: int  # buffers for blocks of keys
    v_stages: int  # and of values
    computing_registers: int
    loading_registers: int


SIZES = {
    64: Sizes(128, 3, 128, 3, 3, 240, 24),
    128: Sizes(128, 2, 128, 2, 2, 240, 24),
    256: Sizes(64, 2, 64, 2, 1, 232, 40),
}
"""By width of the heads."""


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, sizes: Sizes | None = None
) -> Gradients:
    """Gradients of q, k and v, [T, H, D]. `sizes` for tests."""
    total_len, num_heads, dim = q.shape
    made = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    if total_len == 0:
        return Gradients(*made, None, None)
    sizes = sizes or SIZES[dim]
    q, k, v, grad_out = map(with_loadable_rows, (q, k, v, grad_out))
    mask, layout, strip = problem.mask, problem.layout, STRIP.value
    section = section_of(4 * num_heads * dim, mask)  # of two operands of 16 bits
    counters = torch.zeros(2, 4, dtype=torch.int32, device=q.device)
    numbers = (num_heads, *(tensor.stride(1) for tensor in (q, grad_out, k, v)), *scalars(problem))
    key = (q.dtype, dim, mask, sizes)

    items = key_work(mask, layout, strip, sizes.rows, section)
    start(
        wide_keys_kernel,
        key,
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, sizes.rows, dim),
            Boxes(grad_out, sizes.rows, dim),
            Boxes(k, strip, dim),
            Boxes(v, strip, dim),
            Boxes(made[1], strip, dim),
            Boxes(made[2], strip, dim),
        ),
        (items, counters[0]),
        (items.shape[0], *numbers),
        lambda: {"BLOCK_M": sizes.rows, "STAGES": sizes.stages, **_constants(problem, dim, sizes)},
    )
    items = row_work(mask, layout, STRIPS.value * strip, sizes.keys, section)
    start(
        rows_kernel,
        key,
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, strip, dim),
            Boxes(grad_out, strip, dim),
            Boxes(k, sizes.keys, dim),
            Boxes(v, sizes.keys, dim),
            Boxes(made[0], strip, dim),
        ),
        (items, counters[1]),
        (items.shape[0], *numbers),
        lambda: {
            "BLOCK_N": sizes.keys,
            "K_STAGES": sizes.k_stages,
            "V_STAGES": sizes.v_stages,
            **_constants(problem, dim, sizes),
        },
    )
    return Gradients(*made, None, None)


def _constants(problem: Problem, dim: int, sizes: Sizes) -> dict[str, Any]:
    """What both kernels are compiled for, by the names of their parameters."""
    return {
        "D": dim,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(problem.mask),
    }
