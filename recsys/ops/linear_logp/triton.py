"""The Triton backend: tiles over rows and candidates, and no memory but a few numbers a row.

The modules of kernels are imported when one of them runs, so that this one can be asked without Triton.
"""

from __future__ import annotations

from torch import Tensor

from recsys.ops.linear_logp import LogpFacts
from recsys.ops.linear_logp.recompute import Found, Gradients, Operands, Parts, Pieces, Upstream, Wanted
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Support

MAX_WIDTH = {2: 512, 4: 128}
"""By bytes of a number."""

LIBRARY_FROM = 64
"""Columns of float32 beyond which products of the library are faster, forward and backward together."""

_OPS = f"{__name__.rpartition('.')[0]}.triton_ops"

triton_support.preload(_OPS)


def supports(facts: LogpFacts) -> Support:
    """What any Triton backend can do, up to some width: a program holds whole rows of its operand.

    Wide rows in float32 are for those who name it: there the products of the library are faster.
    """
    able = triton_support.support(facts.device, facts.dtype)
    if facts.dtype.itemsize == 4 and facts.width > LIBRARY_FROM:
        able = able._replace(auto=False)
    if not able.ok or facts.width <= (most := MAX_WIDTH[facts.dtype.itemsize]):
        return able
    reason = f"hidden has {facts.width} columns, in {facts.dtype} it takes up to {most}"
    return able._replace(ok=False, reason=reason)


def forward(operands: Operands) -> Parts:
    """Maximum, sum and the target's score of each row."""
    return triton_support.load(_OPS).launch_forward(operands)


def backward(operands: Operands, upstream: Upstream, wanted: Wanted) -> Gradients:
    """Products of the gradient of the scores; each tile of an output has one owner."""
    return triton_support.load(_OPS).launch_backward(operands, upstream, wanted)


def forward_op(*arguments):
    """`forward` in a traced graph."""
    return triton_support.load(_OPS).forward_op(*arguments)


def backward_op(*arguments):
    """`backward` in a traced graph."""
    return triton_support.load(_OPS).backward_op(*arguments)


def whole_forward(operands: Operands, ignore_index: int | None) -> Found:
    """`forward` and what is made of it, with few launches."""
    return triton_support.load(_OPS).whole_forward(operands, ignore_index)


def whole_backward(
    operands: Operands, found: Found, grad_logp: Tensor | None, grad_lse: Tensor | None, wanted: Wanted
) -> Gradients:
    """`backward` and what goes before it, with few launches."""
    return triton_support.load(_OPS).whole_backward(operands, found, grad_logp, grad_lse, wanted)


PIECES = Pieces(forward, backward, forward_op, backward_op, whole_forward, whole_backward)
