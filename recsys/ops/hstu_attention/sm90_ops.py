"""The Hopper kernel as a differentiable op: an autograd function in eager mode, an opaque node in graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys.ops.hstu_attention import sm90_launch, sm90_two_pass, triton_launch, triton_ops
from recsys.ops.hstu_attention.triton_launch import Gradients, Problem
from recsys.ops.layout import SequenceLayout
from recsys.ops.mask import AttentionMask

__all__ = ["HstuAttention", "Problem", "call_op", "forward"]

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor offsets, Tensor num_targets, int num_contextual, "
    "int? window, int prefix, bool target_window, int target_group_size, bool contextual_reads_history, "
    "float alpha, float scale_len, bool deterministic) -> Tensor"
)
_NAME = "recsys::hstu_attention_sm90"

torch.library.define(_NAME, _SCHEMA)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """In eager mode; records no gradients."""
    return sm90_launch.forward(q, k, v, problem, captured=False)


class HstuAttention(triton_ops.HstuAttention):
    """Its forward is the Hopper kernel's."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: None,
        time_table: None,
        problem: Problem,
        deterministic: bool,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem, ctx.deterministic = problem, deterministic
        return forward(q, k, v, problem)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(grad_out, *ctx.saved_tensors, ctx.problem, ctx.deterministic)
        return (*gradients, None, None)


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, deterministic: bool
) -> Gradients:
    """By the Hopper kernels where they can: the one for narrow heads adds up dQ in any order."""
    dim = q.shape[2]
    if dim in sm90_two_pass.SIZES:
        return sm90_two_pass.backward(grad_out, q, k, v, problem)
    if deterministic or dim not in sm90_launch.BACKWARD_SIZES:
        return triton_launch.backward(grad_out, q, k, v, problem, tables=False, deterministic=deterministic)
    return sm90_launch.backward(grad_out, q, k, v, problem)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem, deterministic: bool) -> Tensor:
    """The library op, for traced graphs."""
    layout, mask = problem.layout, problem.mask
    return torch.ops.recsys.hstu_attention_sm90(
        q,
        k,
        v,
        layout.lengths,
        layout.offsets,
        layout.num_targets,
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


@torch.library.impl(_NAME, "cuda")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
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
    total_len = q.shape[0]
    layout = SequenceLayout.trusted(
        lengths, offsets, num_targets, num_contextual, total_len, total_len, total_len
    )
    mask = AttentionMask(window, prefix, target_window, target_group_size, contextual_reads_history)
    return sm90_launch.forward(q, k, v, Problem(layout, mask, alpha, scale_len, None))


@torch.library.register_fake(_NAME)
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.rest = inputs[6:]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = triton_ops.hstu_attention_triton_backward(
        grad_out, *ctx.saved_tensors, None, None, None, None, *ctx.rest
    )
    return (*gradients, None, None, None, *(None for _ in ctx.rest))


torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)
