"""The forward kernel in the form that packages embed.

A package launches kernels by itself, so this form takes plain tensors and makes their descriptors on the GPU,
a few microseconds per launch. `runtime.embedding` says how it gets into a package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recsys.ops.hstu_attention.hopper import launch
from recsys.ops.hstu_attention.hopper.forward import forward_kernel
from recsys.ops.hstu_attention.mask_forms import rule_of
from recsys.ops.hstu_attention.problem import Problem, mask_fields
from recsys.ops.hstu_attention.work_list import row_work
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.descriptors import ALIGNMENT, shape_of
from recsys.ops.runtime.embedding import embed, launched
from recsys.ops.runtime.gluon_pieces import STRIP, ragged_descriptor
from recsys.ops.runtime.registration import flat_signature, traceable_op
from recsys.ops.runtime.triton_support import num_processors


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


def call_op(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Calls the library op, for graphs that become packages.

    The list of work is made outside of the op, where a compiler sees that all layers make the same one.
    """
    mask, num_heads, dim = problem.mask, int(q.shape[1]), int(q.shape[2])
    sizes, section = _sizes(dim, mask, problem.scale_len), launch.section_of(num_heads * dim * 8, mask)
    items = row_work(mask, problem.layout, sizes.rows, sizes.keys, section, strip=STRIP.value)
    numbers = _Numbers(problem.num_contextual, *mask_fields(mask), problem.alpha, problem.scale_len)
    return hstu_attention_sm90_packaged(q, k, v, items, *numbers)


@traceable_op("hstu_attention_sm90_packaged")
@flat_signature(dict.fromkeys(("q", "k", "v", "items"), Tensor), _Numbers, returns=Tensor)
def hstu_attention_sm90_packaged(q: Tensor, k: Tensor, v: Tensor, items: Tensor, *numbers: Any) -> Tensor:
    """Computes what `launch.forward` computes, in a graph, for the list of work that `call_op` makes."""
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
        **launch.forward_constants(dim, _sizes(dim, mask, scale_len), mask),
    )  # fmt: skip
    return out


def _sizes(dim: int, mask: AttentionMask, scale_len: float) -> launch.ForwardSizes:
    """Returns the sizes for rows of samples of `scale_len` tokens: a graph does not know the lengths."""
    seen = scale_len / 2
    return launch.sizes_for(dim, seen if mask.window is None else min(seen, mask.window), mask.window)


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
