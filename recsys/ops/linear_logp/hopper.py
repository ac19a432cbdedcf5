"""The Hopper backend of `linear_logp`: kernels scheduled by hand, for the loss over a catalogue.

This module itself needs no Triton. The kernels are in `sm90_kernels`, their launches in `sm90_ops`. They are
written in Gluon, a part of Triton that changes from one version to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys import environment
from recsys.ops.linear_logp import LogpFacts, triton
from recsys.ops.linear_logp.recompute import Found, Gradients, Operands, Parts, Pieces, Upstream, Wanted
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_WIDTH = 512
"""What there are sizes for in `sm90_ops`."""

_OPS = f"{__name__.rpartition('.')[0]}.hopper_ops"

if (environment.installed_version("triton") or "").startswith(f"{triton_support.GLUON}."):
    triton_support.preload(_OPS)


def supports(facts: LogpFacts) -> Support:
    """Scores of 16 bits, nothing added to them, on a Hopper GPU.

    Rows that are to be normalised or end within 16 bytes are copied, in each pass anew. Normalised ones are
    for those who name it: they are rounded once more than by Triton, and no training has been compared.
    """
    able = triton_support.support(facts.device, facts.dtype)
    if facts.normalized:
        able = able._replace(auto=False)
    if not able.ok or facts.device != "cuda":
        return able._replace(ok=False, reason=able.reason or "it needs CUDA tensors", auto=False)
    for missing in (triton_support.missing_for_hopper(), _missing_from_the_call(facts)):
        if missing:
            return able._replace(ok=False, reason=missing)
    return able


def _missing_from_the_call(facts: LogpFacts) -> str:
    for present, what in (
        (facts.has_bias, "it adds no bias"),
        (facts.has_ids, "it compares no ids"),
        (facts.dtype.itemsize != 2, f"it takes bfloat16 and float16, not {facts.dtype}"),
        (facts.width > MAX_WIDTH, f"hidden has {facts.width} columns, it takes up to {MAX_WIDTH}"),
        (torch.compiler.is_compiling(), "a graph cannot hold it"),
    ):
        if present:
            return what
    return ""


def forward(operands: Operands) -> Parts:
    """Maximum, sum and the target's score of each row."""
    return triton_support.load(_OPS).forward(operands)


def backward(operands: Operands, upstream: Upstream, wanted: Wanted) -> Gradients:
    """Products of the gradient of the scores; each tile of an output has one owner."""
    return triton_support.load(_OPS).backward(operands, upstream, wanted)


def whole_forward(operands: Operands, ignore_index: int | None) -> Found:
    """`forward` and what is made of it, with few launches."""
    return triton_support.load(_OPS).whole_forward(operands, ignore_index)


def whole_backward(
    operands: Operands, found: Found, grad_logp: Tensor | None, grad_lse: Tensor | None, wanted: Wanted
) -> Gradients:
    """`backward` and what goes before it, with few launches."""
    return triton_support.load(_OPS).whole_backward(operands, found, grad_logp, grad_lse, wanted)


PIECES = Pieces(
    forward, backward, triton.forward_op, triton.backward_op, whole_forward, whole_backward
)  # in a traced graph Triton's kernels do it
