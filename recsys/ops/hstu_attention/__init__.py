"""Defines `hstu_attention`: attention over jagged samples with SiLU in place of softmax."""

from __future__ import annotations

from torch import Tensor

from recsys.ops.attention_args import (
    AttentionFacts,
    attention_facts,
    check_attention,
    check_bias,
    is_deterministic,
    scale_of,
)
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime import embedding, triton_support
from recsys.ops.runtime.arguments import check_number
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "Problem", "attend", "hstu_attention"]

_CAUSAL = AttentionMask()


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
    scale_len: float,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """Computes, per head, `out[i] = sum_j silu(alpha <q_i, k_j> + bias[i, j]) v_j / scale_len`.

    The sum runs over the keys `j` that row `i` sees under the mask.

    Args:
        q: [T, H, D] floating point; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V]; V may differ from D.
        mask: who sees whom within a sample.
        alpha: None for `1 / sqrt(D)`; an explicit 0.0 means 0.0.
        scale_len: a positive constant of the model (its maximum length), never a property of the batch: a
            sample's output must not depend on its batch mates.
        bias: relative position and time bias, computed in its tables' dtype and added in that of the scores.
        backend: "auto" takes the first usable one; a named one runs or raises.
        deterministic: whether gradients must be bitwise repeatable; None follows
            `torch.use_deterministic_algorithms`.

    Returns:
        [T, H, V]. Differentiable in q, k, v and both tables of the bias.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Zhai et al., Actions Speak Louder than Words (HSTU), arXiv 2402.17152.
    """
    check_attention(q, k, v, layout, mask)
    alpha = scale_of(q) if alpha is None else alpha
    problem = Problem(layout, mask, alpha, scale_len, bias, deterministic=is_deterministic(deterministic))
    return _run(q, k, v, problem, backend)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    backend: str = "auto",
    grad_buffer: GradientBuffer | None = None,
) -> Tensor:
    """Runs `hstu_attention` for layers, which may also choose where gradients go and which rows are read.

    Args:
        q: [T, H, D]; k: [T, H, D]; v: [T, H, V], as in `hstu_attention`.
        problem: everything else about the call.
        grad_buffer: memory for the gradients of q, k and v, which replaces the problem's buffer; None keeps
            it.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_attention(q, k, v, problem.layout, problem.mask)
    if grad_buffer is not None:
        problem = problem.with_grad_buffer(grad_buffer)
    return _run(q, k, v, problem, backend)


def _run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str) -> Tensor:
    """Checks, for all backends, what `check_attention` does not, and runs the chosen backend."""
    check_number("scale_len", problem.scale_len, positive=True)
    if problem.tail is not None and problem.tail < 0:
        raise ValueError(f"tail must be >= 0, got {problem.tail}")
    check_number("alpha", problem.alpha)
    if problem.bias is not None:
        check_bias(problem.bias, q)
    facts = attention_facts(q, k, v, problem.mask, problem.bias, problem.deterministic)
    chosen = OP.select(facts, backend)
    layout, mask, alpha = problem.layout, problem.mask, problem.alpha
    OP.show(q=q, k=k, layout=layout, mask=mask, alpha=alpha, scale_len=problem.scale_len, bias=problem.bias)
    return chosen.run(q, k, v, problem)


WIDTHS = (64, 128, 256)
"""Head widths, in columns, for which `hopper` has sizes."""

MAX_DIM = 256


def supports_sm90(facts: AttentionFacts) -> Support:
    """Supports 16-bit heads with q, k and v of equal width and no bias, on a Hopper GPU."""
    able = triton_support.hopper_support(facts.device, facts.dtype)
    missing = _missing_from_the_call(facts) if able.ok else ""
    return able._replace(ok=False, reason=missing) if missing else able


def _missing_from_the_call(facts: AttentionFacts) -> str:
    if facts.has_bias:
        return "it has no relative bias"
    if facts.dtype.itemsize != 2:
        return f"it takes bfloat16 and float16, not {facts.dtype}"
    if facts.qk_dim != facts.v_dim or facts.qk_dim not in WIDTHS:
        return f"it takes heads of {WIDTHS} for q, k and v alike, not {facts.qk_dim} and {facts.v_dim}"
    return embedding.reason_against()


def supports_triton(facts: AttentionFacts) -> Support:
    """Support what any Triton backend supports, with heads of up to 256 columns."""
    able = triton_support.support(facts.device, facts.dtype)
    for name, dim in (("qk_dim", facts.qk_dim), ("v_dim", facts.v_dim)):
        if able.ok and dim > MAX_DIM:
            return able._replace(ok=False, reason=f"{name} is {dim}, it takes up to {MAX_DIM}")
    return able


OP = Op("hstu_attention", __name__, backends=("sm90", "triton", "reference"))
