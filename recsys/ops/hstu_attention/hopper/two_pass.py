"""Launches the Hopper gradients in two passes: dK and dV by tiles of keys, then dQ by tiles of rows.

Two passes need seven products instead of five, but no program adds to the sums of another. The result is
therefore bitwise repeatable, and no float32 sums go through memory. Where rows see few keys, two passes are
also faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from recsys.ops.hstu_attention.hopper.backward_keys import keys_kernel
from recsys.ops.hstu_attention.hopper.backward_rows import STRIPS, rows_kernel
from recsys.ops.hstu_attention.hopper.backward_wide import wide_keys_kernel
from recsys.ops.hstu_attention.hopper.launch import WARPS, counter_for, scalars, section_of
from recsys.ops.hstu_attention.mask_forms import rules
from recsys.ops.hstu_attention.problem import Gradients, Problem
from recsys.ops.hstu_attention.work_list import key_work, row_work
from recsys.ops.runtime.descriptors import Boxes, with_loadable_rows
from recsys.ops.runtime.gluon_pieces import STRIP
from recsys.ops.runtime.hopper_launch import launch, programs_for


class TwoPassSizes(NamedTuple):
    """Sizes of both kernels for one head width."""

    rows: int  # rows per block, for tiles of keys
    stages: int  # buffers for blocks of rows of q, and as many for those of the output's gradient
    v_tiles: int  # buffers for tiles of values (keys have two); 0: the kernel for wide heads
    keys: int  # keys per block, for tiles of rows
    k_stages: int  # buffers for blocks of keys
    v_stages: int  # buffers for blocks of values
    apart: bool  # whether dQ leaves through a buffer of its own, not that of q
    computing_registers: int
    loading_registers: int


SIZES = {
    64: TwoPassSizes(64, 4, 2, 64, 4, 4, True, 240, 24),
    128: TwoPassSizes(64, 3, 1, 128, 2, 2, True, 240, 24),
    256: TwoPassSizes(64, 2, 0, 64, 2, 1, False, 232, 40),
}
"""Sizes by head width, in columns."""


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    sizes: TwoPassSizes | None = None,
    *,
    captured: bool = True,
) -> Gradients:
    """Computes the gradients of q, k and v, [T, H, D]. `sizes` and `captured` are those of
    `launch.forward`."""
    gradients = problem.gradient_memory(q, k, v)
    if q.shape[0] == 0:
        return Gradients(*gradients)
    sizes = sizes or SIZES[q.shape[2]]
    operands = [with_loadable_rows(tensor) for tensor in (q, grad_out, k, v)]
    launch_keys(operands, gradients[1], gradients[2], counter_for(q.device, captured), problem, sizes)
    launch_rows(operands, gradients[0], counter_for(q.device, captured), problem, sizes)
    return Gradients(*gradients)


def launch_keys(
    operands: list[Tensor],
    grad_k: Tensor,
    grad_v: Tensor,
    counter: Tensor,
    problem: Problem,
    sizes: TwoPassSizes,
) -> None:
    """Launches the kernel of dK and dV; `operands` are q, dO, k and v."""
    q, grad_out, k, v = operands
    _, num_heads, dim = q.shape
    strip = STRIP.value
    tile = STRIPS.value * strip if sizes.v_tiles else strip
    section = _section(q, problem)
    items = key_work(problem.mask, problem.layout, tile, sizes.rows, section, problem.tail)
    buffers = {"V_STAGES": sizes.v_tiles} if sizes.v_tiles else {}
    launch(
        keys_kernel if sizes.v_tiles else wide_keys_kernel,
        (q.dtype, dim, problem.mask, sizes),
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, sizes.rows, dim),
            Boxes(grad_out, sizes.rows, dim),
            Boxes(k, tile, dim),
            Boxes(v, tile, dim),
            Boxes(grad_k, strip, dim),
            Boxes(grad_v, strip, dim),
        ),
        (items, counter),
        _numbers(items, operands, problem),
        lambda: {
            "BLOCK_M": sizes.rows,
            "STAGES": sizes.stages,
            **buffers,
            **_constants(problem, dim, sizes),
        },
    )


def launch_rows(
    operands: list[Tensor], grad_q: Tensor, counter: Tensor, problem: Problem, sizes: TwoPassSizes
) -> None:
    """Launches the kernel of dQ; `operands` are q, dO, k and v."""
    q, grad_out, k, v = operands
    _, num_heads, dim = q.shape
    strip, section = STRIP.value, _section(q, problem)
    tile = STRIPS.value * strip
    items = row_work(problem.mask, problem.layout, tile, sizes.keys, section, problem.tail)
    launch(
        rows_kernel,
        (q.dtype, dim, problem.mask, sizes),
        programs_for(q.device, items.shape[0] * num_heads),
        (
            Boxes(q, strip, dim),
            Boxes(grad_out, strip, dim),
            Boxes(k, sizes.keys, dim),
            Boxes(v, sizes.keys, dim),
            Boxes(grad_q, strip, dim),
        ),
        (items, counter),
        _numbers(items, operands, problem),
        lambda: {
            "BLOCK_N": sizes.keys,
            "K_STAGES": sizes.k_stages,
            "V_STAGES": sizes.v_stages,
            "APART": sizes.apart,
            **_constants(problem, dim, sizes),
        },
    )


def _section(q: Tensor, problem: Problem) -> int | None:
    return section_of(4 * q.shape[1] * q.shape[2], problem.mask)  # two operands of 16 bits per element


def _numbers(items: Tensor, operands: list[Tensor], problem: Problem) -> tuple[int | float, ...]:
    """Returns the numbers of both kernels in the order of their parameters, from `num_items` to
    `group_size`."""
    num_heads = operands[0].shape[1]
    return (items.shape[0], num_heads, *(tensor.stride(1) for tensor in operands), *scalars(problem))


def _constants(problem: Problem, dim: int, sizes: TwoPassSizes) -> dict[str, Any]:
    """Returns the compile-time constants of both kernels, by the names of their parameters."""
    return {
        "D": dim,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
        "num_warps": WARPS,
        **rules(problem.mask),
    }
