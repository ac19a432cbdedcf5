"""The Hopper backend of `hstu_attention`: hand-scheduled kernels, an autograd function in eager mode, nodes
of graphs.

The kernels are written in Gluon, a part of Triton that changes between versions:

    forward     the outputs
    backward    all gradients in one pass, where sums in any order are allowed, heads are not too wide and
                rows see many keys
    two_pass    dK and dV, then dQ (`wide` has dK and dV for wide heads)

In a compiled graph the op is one opaque node. A package launches kernels by itself, so the forward kernel has
another form for packages, which takes plain tensors and makes their descriptors on the GPU, a few
microseconds per launch. `runtime.embedding` says how it gets into a package.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recsys.ops.hstu_attention.hopper import backward, forward, two_pass
from recsys.ops.hstu_attention.hopper.forward import forward_kernel
from recsys.ops.hstu_attention.mask_forms import rule_of
from recsys.ops.hstu_attention.problem import (
    NUM_FLAT_TENSORS,
    FlatProblem,
    Gradients,
    Problem,
    flattened,
    mask_fields,
)
from recsys.ops.hstu_attention.work_list import row_work
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.descriptors import ALIGNMENT, shape_of
from recsys.ops.runtime.dispatch import is_exporting
from recsys.ops.runtime.embedding import embed, launched
from recsys.ops.runtime.gluon_pieces import STRIP, ragged_descriptor
from recsys.ops.runtime.registration import differentiable, flat_signature, opaque_op, saving, traceable_op
from recsys.ops.runtime.triton_support import num_processors

ONE_PASS_ABOVE = {64: (240, 120), 128: (512, 400)}
"""Visible keys per row above which gradients come in one pass, as `average_visible_keys` estimates
them: by head width, without a window and within one.

One pass has five products, two passes have seven. Two passes neither start with zeros nor end with rounding,
need no sums in float32, and wait less where tiles are short. On an H200
(experiments/2026-11-22-gpu-attention-3/backward.md) both take equally long for samples of 950 to 1024 tokens
with 128 columns, and of 600 tokens with 64; the limits are a compromise for batches of mixed lengths.
"""


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Runs the kernels: scores and sums are float32, weights are rounded to the dtype of v."""
    if torch.compiler.is_compiling():
        return call_op(q, k, v, problem)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return HstuAttention.apply(q, k, v, None, None, problem)
    return forward.forward(q, k, v, problem, captured=False)


class HstuAttention(torch.autograd.Function):
    """Autograd function, called as `apply(q, k, v, None, None, problem)`: no bias, so no gradients of
    tables."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, position_table: None, time_table: None, problem: Problem
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.problem = problem
        return forward.forward(q, k, v, problem, captured=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(grad_out, *ctx.saved_tensors, ctx.problem, captured=False)
        return (*gradients, None)


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, captured: bool
) -> Gradients:
    """Computes the gradients in one pass, which sums dQ in any order, where that is allowed, supported and
    faster; otherwise in two.

    `captured` is described in `forward.forward`.
    """
    limits = ONE_PASS_ABOVE.get(q.shape[2], (math.inf, math.inf))
    few = forward.average_visible_keys(problem) <= limits[problem.mask.window is not None]
    if problem.deterministic or few:
        return two_pass.backward(grad_out, q, k, v, problem, captured=captured)
    return backward.backward(grad_out, q, k, v, problem, captured=captured)


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Calls the library op, for traced graphs."""
    if is_exporting():
        return call_packaged(q, k, v, problem)
    return hstu_attention_sm90(q, k, v, *flattened(problem))


@flat_signature(dict.fromkeys(("q", "k", "v"), Tensor), FlatProblem, returns=Tensor)
def _run(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Tensor:
    return forward.forward(q, k, v, FlatProblem(*flat).rebuilt(q.shape[0]))


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


class _Numbers(NamedTuple):
    """The numbers of a problem as the library op takes them."""

    num_contextual: int
    window: int | None
    prefix: int
    target_window: bool
    target_group_size: int
    contextual_reads_history: bool
    alpha: float
    scale_len: float


def call_packaged(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Calls the library op, for graphs that become packages.

    The list of work is made outside of the op, where a compiler sees that all layers make the same one.
    """
    mask, num_heads, dim = problem.mask, int(q.shape[1]), int(q.shape[2])
    sizes, section = _sizes(dim, mask, problem.scale_len), forward.section_of(num_heads * dim * 8, mask)
    items = row_work(mask, problem.layout, sizes.rows, sizes.keys, section, strip=STRIP.value)
    numbers = _Numbers(problem.num_contextual, *mask_fields(mask), problem.alpha, problem.scale_len)
    return hstu_attention_sm90_packaged(q, k, v, items, *numbers)


@traceable_op("hstu_attention_sm90_packaged")
@flat_signature(dict.fromkeys(("q", "k", "v", "items"), Tensor), _Numbers, returns=Tensor)
def hstu_attention_sm90_packaged(q: Tensor, k: Tensor, v: Tensor, items: Tensor, *numbers: Any) -> Tensor:
    """Computes what `forward` computes, in a graph, for the list of work that `call_packaged` makes."""
    num_contextual, *fields, alpha, scale_len = numbers
    mask, (num_heads, dim) = AttentionMask(*fields), map(int, q.shape[1:])
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k, v = map(_loadable, (q, k, v))
    num_items = items.shape[0]
    counter = torch.zeros(4, dtype=torch.int32, device=q.device)
    programs = torch.sym_min(num_processors(q.device), num_items * num_heads)
    wrap_triton(launched(forward_stand_in))[(programs,)](
        q, k, v, out, items, counter, num_items, num_heads, q.stride(0), k.stride(0), v.stride(0),
        q.stride(1), k.stride(1), v.stride(1), 0.5 * alpha, 1.0 / scale_len, *rule_of(mask, num_contextual),
        **forward.forward_constants(dim, _sizes(dim, mask, scale_len), mask),
    )  # fmt: skip
    return out


def _sizes(dim: int, mask: AttentionMask, scale_len: float) -> forward.ForwardSizes:
    """Returns the sizes for rows of samples of `scale_len` tokens: a graph does not know the lengths."""
    seen = scale_len / 2
    return forward.sizes_for(dim, seen if mask.window is None else min(seen, mask.window), mask.window)


def _loadable(tensor: Tensor) -> Tensor:
    """Returns the tensor [T, H, D] if a descriptor can describe it, otherwise a copy."""
    is_aligned = tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
    if is_aligned and shape_of(tensor).loadable:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@gluon.jit
def packaged_forward_kernel(
    q, k, v, out, items, counter, num_items, num_heads, row_q, row_k, row_v, stride_q, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIPS: gl.constexpr,
    WINDOWED: gl.constexpr, TARGET_WINDOW: gl.constexpr,
    GROUPED: gl.constexpr, CONTEXTUAL_READS: gl.constexpr,
    HELD: gl.constexpr, Q_TILES: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr, LOADING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Runs `forward_kernel` on q, k, v [T, H, D] with rows `row_q`, `row_k`, `row_v` elements apart."""
    # The compiler of packages makes constants of integers that are 1, and passes float64.
    num_items, num_heads = gl.to_tensor(num_items).to(gl.int32), gl.to_tensor(num_heads)
    stride_q, stride_k, stride_v = gl.to_tensor(stride_q), gl.to_tensor(stride_k), gl.to_tensor(stride_v)
    half_alpha = gl.to_tensor(half_alpha).to(gl.float32)
    inverse_scale = gl.to_tensor(inverse_scale).to(gl.float32)
    last = num_heads - 1
    forward_kernel(
        ragged_descriptor(q, row_q, last * stride_q + D, STRIP, D),
        ragged_descriptor(k, row_k, last * stride_k + D, BLOCK_N, D),
        ragged_descriptor(v, row_v, last * stride_v + D, BLOCK_N, D),
        ragged_descriptor(out, num_heads * D, num_heads * D, STRIP, D),
        items, counter, num_items, num_heads, stride_q, stride_k, stride_v, half_alpha, inverse_scale,
        gl.to_tensor(num_contextual), gl.to_tensor(window), gl.to_tensor(prefix), gl.to_tensor(group_size),
        D, BLOCK_N, STAGES, STRIPS, WINDOWED, TARGET_WINDOW, GROUPED, CONTEXTUAL_READS, HELD, Q_TILES,
        COMPUTING_REGISTERS, LOADING_REGISTERS,
    )  # fmt: skip


@triton.jit
def forward_stand_in(
    q, k, v, out, items, counter, num_items, num_heads, row_q, row_k, row_v, stride_q, stride_k, stride_v,
    half_alpha, inverse_scale, num_contextual, window, prefix, group_size,
    D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, STRIPS: tl.constexpr,
    WINDOWED: tl.constexpr, TARGET_WINDOW: tl.constexpr,
    GROUPED: tl.constexpr, CONTEXTUAL_READS: tl.constexpr,
    HELD: tl.constexpr, Q_TILES: tl.constexpr,
    COMPUTING_REGISTERS: tl.constexpr, LOADING_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Tells a compiler what `packaged_forward_kernel` reads and writes. Run, it would write NaN."""
    read = tl.load(q) + tl.load(k) + tl.load(v) + tl.load(items) + tl.atomic_add(counter, 1)
    tl.store(out, read + float("nan"))


embed(forward_stand_in, packaged_forward_kernel)
