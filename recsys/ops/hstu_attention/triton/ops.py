"""Make the Triton kernels differentiable: an autograd function in eager mode, library ops in graphs.

Eager dispatch through the library costs about 60 us per call, so eager mode calls `HstuAttention` directly.
In a traced graph `recsys::hstu_attention_triton` is one node, whose kernels a compiler sees and embeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.hstu_attention.problem import (
    FLAT_TABLES,
    NUM_FLAT_TENSORS,
    FlatProblem,
    Problem,
    flattened,
)
from recsys.ops.hstu_attention.triton import launch
from recsys.ops.runtime.registration import differentiable, flat_signature, saving, traceable_op


class HstuAttention(torch.autograd.Function):
    """Autograd function, called as `apply(q, k, v, position_table, time_table, problem)`.

    The tables are those of the problem's bias, or None; they are separate parameters so that they get
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: Tensor | None,
        time_table: Tensor | None,
        problem: Problem,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem = problem
        return launch.forward(q, k, v, problem)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tables = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        gradients = launch.backward(grad_out, *ctx.saved_tensors, ctx.problem, tables=tables)
        return (*gradients, None)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Call the library op, for traced graphs."""
    return hstu_attention_triton(q, k, v, *flattened(problem))


@traceable_op("hstu_attention_triton")
@flat_signature(dict.fromkeys(("q", "k", "v"), Tensor), FlatProblem, returns=Tensor)
def hstu_attention_triton(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tensor:
    """Compute `hstu_attention` for a flattened problem."""
    return launch.forward(q, k, v, FlatProblem(*flat).rebuilt(q.shape[0]), wrap_triton)


@traceable_op("hstu_attention_triton_backward")
@flat_signature(dict.fromkeys(("grad_out", "q", "k", "v"), Tensor), FlatProblem, returns=list[Tensor])
def hstu_attention_triton_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *flat: Any
) -> list[Tensor]:
    """Compute the gradients of q, k and v, and of both tables if there are any."""
    problem = FlatProblem(*flat).rebuilt(q.shape[0])
    gradients = launch.backward(grad_out, q, k, v, problem, tables=problem.bias is not None, wrap=wrap_triton)
    return [gradient for gradient in gradients if gradient is not None]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = hstu_attention_triton_backward(grad_out, *ctx.saved_tensors, *ctx.rest)
    flat: list[Tensor | None] = [None] * (NUM_FLAT_TENSORS + len(ctx.rest))
    flat[FLAT_TABLES : FLAT_TABLES + 2] = gradients[3:] or (None, None)
    return (*gradients[:3], *flat)


differentiable(hstu_attention_triton, _backward, saving(3 + NUM_FLAT_TENSORS))
