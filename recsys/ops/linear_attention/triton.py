"""Makes the launches of `linear_attention` differentiable: in eager mode and as library ops in graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.linear_attention import Inputs
from recsys.ops.linear_attention import triton_launch as launches
from recsys.ops.linear_attention.chunks import chunk_table, chunk_table_of
from recsys.ops.linear_attention.triton_launch import (
    Kept,
    Problem,
    chunks_per_segment,
    decay_sums,
    launch_backward,
    launch_forward,
    problem_of,
)
from recsys.ops.runtime.registration import differentiable, flat_signature, saving, traceable_op

TRACED_SEGMENT = 32
"""Chunks per segment in a traced graph, which must serve batches of all sizes."""


def run(inputs: Inputs, layout: SequenceLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, V] and the final state [B, H, D, V]; the arguments have been validated."""
    if torch.compiler.is_compiling():
        facts = (layout.lengths, layout.offsets, layout.num_targets)
        return linear_attention_triton(*inputs, *facts, scale)
    return LinearAttentionFunction.apply(*inputs, layout, scale)


class LinearAttentionFunction(torch.autograd.Function):
    """Autograd function, called as `apply(*inputs, layout, scale)`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, layout, scale = arguments
        q, k, v, log_decay, beta, initial_state = inputs
        per_segment = 0 if beta is not None else chunks_per_segment(q, v, layout.total_len, layout.max_len)
        table = chunk_table_of(layout, launches.CHUNK, per_segment)
        ctx.facts = (table, scale, None, per_segment > 0)
        ctx.decay_dtype = log_decay.dtype
        # Keeps the sums instead of the decays: they are as large, and backward need not compute them again.
        kept = (q, k, v, decay_sums(log_decay, table, q.dtype, None), beta, initial_state)
        out, final, computed = launch_forward(problem_of(kept, *ctx.facts))
        ctx.save_for_backward(*kept, *computed)
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        problem = problem_of(tensors[:6], *ctx.facts)
        gradients = launch_backward(problem, ctx.decay_dtype, Kept(*tensors[6:]), grad_out, grad_final)
        if problem.beta is None:
            return (*gradients[:4], None, gradients.initial_state, None, None)
        return (*gradients, None, None)


def _traced(inputs: Inputs, lengths: Tensor, offsets: Tensor, num_targets: Tensor, scale: float) -> Problem:
    """Describes the call of a traced graph."""
    q, k, v, log_decay, beta, initial_state = inputs
    per_segment = TRACED_SEGMENT if beta is None else 0
    table = chunk_table(lengths, offsets, num_targets, q.shape[0], launches.CHUNK, per_segment)
    sums = decay_sums(log_decay, table, q.dtype, wrap_triton)
    return problem_of((q, k, v, sums, beta, initial_state), table, scale, wrap_triton, per_segment > 0)


FACTS = dict.fromkeys(("lengths", "offsets", "num_targets"), Tensor) | {"scale": float}
"""Parameters of the library ops after the inputs."""


@traceable_op("linear_attention_triton")
@flat_signature(Inputs, FACTS, returns=tuple[Tensor, Tensor])
def linear_attention_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes `linear_attention` in traced graphs."""
    return launch_forward(_traced(Inputs(*arguments[:6]), *arguments[6:]))[:2]


@traceable_op("linear_attention_triton_backward")
@flat_signature({"grad_out": Tensor, "grad_final": Tensor}, Inputs, FACTS, returns=tuple[(Tensor,) * 6])
def linear_attention_triton_backward(
    grad_out: Tensor, grad_final: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Computes the gradients of the inputs; that of beta is empty without the delta rule."""
    inputs = Inputs(*arguments[:6])
    problem = _traced(inputs, *arguments[6:])
    return tuple(launch_backward(problem, inputs.log_decay.dtype, None, grad_out, grad_final))


def _backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    gradients = linear_attention_triton_backward(grad_out, grad_final, *ctx.saved_tensors, *ctx.rest)
    of_beta = None if ctx.saved_tensors[4] is None else gradients[4]
    return (*gradients[:4], of_beta, gradients[5], None, None, None, None)


differentiable(linear_attention_triton, _backward, saving(9))
