"""Makes the Hopper kernels a differentiable op: an autograd function in eager mode, an opaque node in
graphs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recsys.ops.hstu_attention.hopper import launch, packaged, two_pass
from recsys.ops.hstu_attention.problem import (
    NUM_FLAT_TENSORS,
    FlatProblem,
    Gradients,
    Problem,
    flattened,
)
from recsys.ops.runtime.dispatch import is_exporting
from recsys.ops.runtime.registration import differentiable, flat_signature, opaque_op, saving

ONE_PASS_ABOVE = {64: (240, 120), 128: (512, 400)}
"""Visible keys per row above which gradients come in one pass, as `launch.average_visible_keys` estimates
them: by head width, without a window and within one.

One pass has five products, two passes have seven. Two passes neither start with zeros nor end with rounding,
need no sums in float32, and wait less where tiles are short. On an H200
(experiments/2026-11-22-gpu-attention-3/backward.md) both take equally long for samples of 950 to 1024 tokens
with 128 columns, and of 600 tokens with 64; the limits are a compromise for batches of mixed lengths.
"""


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Runs the forward kernel in eager mode, without gradients."""
    return launch.forward(q, k, v, problem, captured=False)


class HstuAttention(torch.autograd.Function):
    """Autograd function, called as `apply(q, k, v, None, None, problem)`: no bias, so no gradients of
    tables."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: None,
        time_table: None,
        problem: Problem,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem = problem
        return forward(q, k, v, problem)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(grad_out, *ctx.saved_tensors, ctx.problem, captured=False)
        return (*gradients, None)


def _gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    captured: bool,
) -> Gradients:
    """Computes the gradients in one pass, which sums dQ in any order, where that is allowed, supported and
    faster; otherwise in two.

    `captured` is described in `launch.forward`.
    """
    limits = ONE_PASS_ABOVE.get(q.shape[2], (math.inf, math.inf))
    few = launch.average_visible_keys(problem) <= limits[problem.mask.window is not None]
    if problem.deterministic or few:
        return two_pass.backward(grad_out, q, k, v, problem, captured=captured)
    return launch.backward(grad_out, q, k, v, problem, captured=captured)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Calls the library op, for traced graphs."""
    if is_exporting():
        return packaged.call_op(q, k, v, problem)
    return hstu_attention_sm90(q, k, v, *flattened(problem))


@flat_signature(dict.fromkeys(("q", "k", "v"), Tensor), FlatProblem, returns=Tensor)
def _run(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tensor:
    return launch.forward(q, k, v, FlatProblem(*flat).rebuilt(q.shape[0]))


@flat_signature(
    dict.fromkeys(("grad_out", "q", "k", "v"), Tensor), FlatProblem, returns=tuple[Tensor, Tensor, Tensor]
)
def _run_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor]:
    problem = FlatProblem(*flat).rebuilt(q.shape[0])
    gradients = _gradients(grad_out, q, k, v, problem, captured=True)
    return gradients.q, gradients.k, gradients.v


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)
    )
    return grad_q, grad_k, grad_v


hstu_attention_sm90 = opaque_op("hstu_attention_sm90", _run, _fake, devices=("cuda",))
hstu_attention_sm90_backward = opaque_op(
    "hstu_attention_sm90_backward", _run_backward, _fake_backward, devices=("cuda",)
)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    gradients = hstu_attention_sm90_backward(grad_out, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, *[None] * (NUM_FLAT_TENSORS + len(ctx.rest)))


differentiable(hstu_attention_sm90, _backward, saving(3 + NUM_FLAT_TENSORS))
