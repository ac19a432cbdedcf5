"""The Triton kernels as differentiable ops: an autograd function in eager mode, library ops in graphs.

Eager dispatch through the library costs about 60 us a call, so `HstuAttention` is called directly there. In a
traced graph `recsys::hstu_attention_triton` is one node, whose kernels a compiler sees and embeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.hstu_attention.triton import launch
from recsys.ops.hstu_attention.triton.launch import Problem
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.registration import differentiable, saving, visible


class HstuAttention(torch.autograd.Function):
    """`apply(q, k, v, position_table, time_table, problem, deterministic)`; the tables are those of the
    problem's bias, given apart so that they get gradients, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: Tensor | None,
        time_table: Tensor | None,
        problem: Problem,
        deterministic: bool,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem, ctx.deterministic = problem, deterministic
        return launch.forward(q, k, v, problem)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tables = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        gradients = launch.backward(
            grad_out, *ctx.saved_tensors, ctx.problem, tables=tables, deterministic=ctx.deterministic
        )
        return (*gradients, None, None)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem, deterministic: bool) -> Tensor:
    """The library op, for traced graphs."""
    layout, mask, bias = problem.layout, problem.mask, problem.bias
    tables = (None,) * 4
    if bias is not None:
        tables = (bias.position_table, bias.time_table, bias.timestamps, bias.next_timestamps)
    return hstu_attention_triton(
        q,
        k,
        v,
        layout.lengths,
        layout.offsets,
        layout.num_targets,
        *tables,
        layout.num_contextual,
        mask.window,
        mask.prefix,
        mask.target_window,
        mask.target_group_size,
        mask.contextual_reads_history,
        problem.alpha,
        problem.scale_len,
        deterministic,
    )


def _problem(
    q: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    timestamps: Tensor | None,
    next_timestamps: Tensor | None,
    num_contextual: int,
    window: int | None,
    prefix: int,
    target_window: bool,
    target_group_size: int,
    contextual_reads_history: bool,
    alpha: float,
    scale_len: float,
) -> Problem:
    total_len = q.shape[0]  # also a bound of the longest sample and of the number of targets
    layout = SequenceLayout.trusted(
        lengths, offsets, num_targets, num_contextual, total_len, total_len, total_len
    )
    mask = AttentionMask(window, prefix, target_window, target_group_size, contextual_reads_history)
    bias = None
    if position_table is not None and time_table is not None:
        if timestamps is None or next_timestamps is None:
            raise ValueError("bias tables without timestamps and next_timestamps")
        bias = RelativeBias(position_table, time_table, timestamps, next_timestamps)
    return Problem(layout, mask, alpha, scale_len, bias)


@visible("hstu_attention_triton")
def hstu_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    timestamps: Tensor | None,
    next_timestamps: Tensor | None,
    num_contextual: int,
    window: int | None,
    prefix: int,
    target_window: bool,
    target_group_size: int,
    contextual_reads_history: bool,
    alpha: float,
    scale_len: float,
    deterministic: bool,
) -> Tensor:
    """`hstu_attention` with its layout, mask and bias spread out."""
    problem = _problem(
        q,
        lengths,
        offsets,
        num_targets,
        position_table,
        time_table,
        timestamps,
        next_timestamps,
        num_contextual,
        window,
        prefix,
        target_window,
        target_group_size,
        contextual_reads_history,
        alpha,
        scale_len,
    )
    return launch.forward(q, k, v, problem, wrap_triton)


@visible("hstu_attention_triton_backward")
def hstu_attention_triton_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    timestamps: Tensor | None,
    next_timestamps: Tensor | None,
    num_contextual: int,
    window: int | None,
    prefix: int,
    target_window: bool,
    target_group_size: int,
    contextual_reads_history: bool,
    alpha: float,
    scale_len: float,
    deterministic: bool,
) -> list[Tensor]:
    """Gradients of q, k and v, and of both tables if there are any."""
    problem = _problem(
        q,
        lengths,
        offsets,
        num_targets,
        position_table,
        time_table,
        timestamps,
        next_timestamps,
        num_contextual,
        window,
        prefix,
        target_window,
        target_group_size,
        contextual_reads_history,
        alpha,
        scale_len,
    )
    gradients = launch.backward(
        grad_out,
        q,
        k,
        v,
        problem,
        tables=problem.bias is not None,
        deterministic=deterministic,
        wrap=wrap_triton,
    )
    return [gradient for gradient in gradients if gradient is not None]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = hstu_attention_triton_backward(grad_out, *ctx.saved_tensors, *ctx.rest)
    tables = tuple(gradients[3:]) or (None, None)
    return (*gradients[:3], None, None, None, *tables, None, None, *(None for _ in ctx.rest))


differentiable(hstu_attention_triton, _backward, saving(10))
