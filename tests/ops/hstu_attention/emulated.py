"""Hopper kernels of attention in the emulator of `tests.tools`, and what they must come near to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention import Problem, reference
from tests.ops import harness
from tests.ops.cases import layout_of, samples

CAUSAL, EVERYTHING = AttentionMask(), AttentionMask(130, 70, True, 5)
LONG_MASKS = (AttentionMask(window=40, prefix=9), EVERYTHING)
CONTEXTUAL = (0, 3, 70)
PASSES = ("forward", "one pass", "two passes")


def inputs(total_len: int, dim: int = 64, heads: int = 1) -> list[Tensor]:
    """q, k and v as parts of one projection, as the layers have them, and a cotangent."""
    whole = harness.normal(total_len, 3 * heads * dim, dtype=torch.bfloat16)
    parts = [part.view(total_len, heads, dim) for part in whole.split(heads * dim, 1)]
    return [*parts, harness.normal(total_len, heads, dim, seed=1, dtype=torch.bfloat16)]


def results(layout: SequenceLayout, mask: AttentionMask, tensors: Sequence[Tensor], dtype: torch.dtype):
    """The reference's output and gradients of q, k and v, in this type."""
    *leaves, cotangent = (tensor.detach().to(dtype) for tensor in tensors)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = reference.run(*leaves, Problem(layout, mask, leaves[0].shape[2] ** -0.5, 50.0))
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def by_kernels(tensors, problem, passes, sizes=None, backward_sizes=None) -> list[dict[str, Tensor]]:
    """The results of each pass by name, "o" or "q", "k" and "v", in memory that held NaN."""
    from recsys.ops.hstu_attention.hopper import backward, forward, two_pass

    *given, cotangent = tensors
    passed = []
    if "forward" in passes:
        passed.append({"o": forward.forward(*given, problem, sizes)})
    if "one pass" in passes and given[0].shape[2] in backward.BACKWARD_SIZES:
        grads = backward.backward(cotangent, *given, problem, backward_sizes)[:3]
        passed.append(dict(zip("qkv", grads, strict=True)))
    if "two passes" in passes:
        passed.append(dict(zip("qkv", two_pass.backward(cotangent, *given, problem)[:3], strict=True)))
    return passed


def check(shapes, contextual=0, mask=CAUSAL, dim=64, *, heads=1, passes=PASSES, tail=None, **sizes) -> None:
    """Not further from float64 than twice the reference in bfloat16, and 1e-3 of the norm.

    With a tail q and the cotangent are zeros where nobody reads, and there results may be anything.
    """
    layout = layout_of(samples(contextual, shapes))
    tensors, read = inputs(layout.total_len, dim, heads), slice(None)
    if tail is not None:
        read = layout.truncate(tail).index
        unread = torch.ones(layout.total_len, dtype=torch.bool).index_fill_(0, read, False)
        for tensor in (tensors[0], tensors[3]):
            tensor[unread] = 0
    problem = Problem(layout, mask, dim**-0.5, 50.0, tail=tail)
    exact, theirs = (
        dict(zip("oqkv", results(layout, mask, tensors, dtype), strict=True))
        for dtype in (torch.float64, torch.bfloat16)
    )
    for ours in by_kernels(tensors, problem, passes, **sizes):
        for name, got in ours.items():
            rows = read if name in "oq" else slice(None)
            three = ([values[rows]] for values in (got, theirs[name], exact[name]))
            harness.assert_as_near(*three, floor=1e-3)
