"""Implements the reference in plain PyTorch, a block of rows at a time, on any device and in any dtype.

It holds all scores of a block at once, in float32 or wider; backward computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recsys.ops.linear_logp.recompute import (
    Backend,
    Gradients,
    Operands,
    OutputGrads,
    RequestedGrads,
    RowSums,
    fake_gradients,
    is_row,
    projected,
    rebuilt,
)
from recsys.ops.runtime.registration import flat_signature, opaque_op

BLOCK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Scores held at once, by device: 2 MiB of float32 stay in a CPU's cache; a GPU needs large blocks."""


def forward(operands: Operands) -> RowSums:
    """Computes the maximum, the sum and the target's score of each row."""
    hidden, weight, bias = _wide(operands)
    maximum, total, score = (hidden.new_empty(hidden.shape[0]) for _ in range(3))
    with torch.autocast(hidden.device.type, enabled=False):
        for block in _blocks(operands):
            scores = _scores(operands, block, hidden[block], weight, bias)
            if operands.target is not None:
                score[block] = scores.gather(1, _places(operands, block).clamp(min=0))[:, 0]
            best = torch.amax(scores, 1, out=maximum[block])
            finite = torch.where(best == -torch.inf, 0, best)
            torch.sum(scores.sub_(finite[:, None]).exp_(), 1, out=total[block])
    return RowSums(maximum, total, score)


def backward(operands: Operands, output_grads: OutputGrads, requested: RequestedGrads) -> Gradients:
    """Computes the products with the gradient of the scores."""
    hidden, weight, bias = _wide(operands)
    # z does not change when hidden, bias and temperature grow by the same factor, so by Euler's theorem the
    # gradient of the scale follows from those of hidden and bias.
    of_hidden, of_bias = (
        requested.hidden or requested.scale,
        bias is not None and (requested.bias or requested.scale),
    )
    grad_hidden = torch.empty_like(hidden) if of_hidden else None
    grad_weight = torch.zeros_like(weight) if requested.weight else None
    grad_bias = weight.new_zeros(weight.shape[0]) if of_bias else None
    with torch.autocast(hidden.device.type, enabled=False):
        for block in _blocks(operands):
            scores = _scores(operands, block, hidden[block], weight, bias)
            grad = (
                scores.sub_(output_grads.maximum[block, None]).exp_().mul_(output_grads.factor[block, None])
            )
            if operands.target is not None:
                places = _places(operands, block)
                first = places.clamp(min=0)
                of_target = output_grads.of_target[block, None]
                grad.scatter_(1, first, torch.where(places < 0, grad.gather(1, first), of_target))
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[block])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[block])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
    grad_scale = _of_scale(operands, hidden, grad_hidden, grad_bias) if requested.scale else None
    return Gradients(
        _of_rows(grad_hidden, operands.hidden, operands.hidden_norms, operands) if requested.hidden else None,
        _rounded(_of_weight(grad_weight, operands), operands.weight.dtype),
        grad_bias * operands.scale if grad_bias is not None and requested.bias else None,
        grad_scale,
    )


@flat_signature(Operands, returns=tuple[Tensor, Tensor, Tensor])
def _forward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `forward` as one node of a traced graph, for any number of blocks."""
    return forward(Operands(*operands))


def _fake(*operands: Any) -> tuple[Tensor, ...]:
    hidden, scale = operands[0], operands[3]
    return tuple(scale.new_empty(hidden.shape[0]) for _ in range(3))


@flat_signature(Operands, OutputGrads, {"requested": list[bool]}, returns=list[Tensor])
def _backward(*arguments: Any) -> list[Tensor]:
    """Runs `backward` as one node of a traced graph; returns the `requested` gradients in order."""
    return [gradient for gradient in backward(*rebuilt(arguments)) if gradient is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    hidden, weight, _, scale = arguments[:4]
    return fake_gradients(hidden, weight, scale, arguments[-1])


forward_op = opaque_op("linear_logp_forward", _forward, _fake)
backward_op = opaque_op("linear_logp_backward", _backward, _fake_backward)


def backend() -> Backend:
    """Returns the loops over scores."""
    return BACKEND


BACKEND = Backend(forward, backward, forward_op, backward_op)


def _wide(operands: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns scaled hidden, weight and scaled bias in the dtype of the scale, with rows normalized if
    requested."""
    hidden, weight, bias, scale = operands[:4]
    hidden, weight = hidden.to(scale.dtype), weight.to(scale.dtype)
    if operands.hidden_norms is not None and operands.weight_norms is not None:
        hidden, weight = hidden * operands.hidden_norms[:, None], weight * operands.weight_norms[:, None]
    scaled_bias = None if bias is None else bias.to(scale.dtype) * scale
    return hidden * scale, weight, scaled_bias


def _blocks(operands: Operands) -> Iterator[slice]:
    rows, candidates = operands.hidden.shape[0], operands.weight.shape[0]
    max_scores = BLOCK_SCORES.get(operands.hidden.device.type, BLOCK_SCORES["cuda"])
    size = max(1, max_scores // candidates)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def _scores(operands: Operands, block: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes scores [rows of the block, V], -inf for accidental hits."""
    scores = hidden @ weight.T
    if bias is not None:
        scores += bias
    if operands.candidate_ids is not None and operands.target_ids is not None:
        hit = operands.target_ids[block, None] == operands.candidate_ids
        if operands.target is not None:
            places = _places(operands, block)
            first = places.clamp(min=0)
            hit.scatter_(1, first, hit.gather(1, first) & (places < 0))
        scores.masked_fill_(hit, -torch.inf)
    return scores


def _places(operands: Operands, block: slice) -> Tensor:
    """Returns targets [rows of the block, 1], -1 where there is none."""
    target = operands.target[block, None]
    return torch.where(is_row(target, operands.weight.shape[0]), target, -1)


def _of_scale(operands: Operands, hidden: Tensor, grad: Tensor, grad_bias: Tensor | None) -> Tensor:
    """Computes [1], the sum over i, j of dz[i, j] z[i, j] / scale. `hidden` is scaled, `grad` [N, D] is
    not."""
    total = (hidden * grad).sum()
    if operands.bias is not None and grad_bias is not None:
        # A bias of -inf has a gradient of 0.
        total = total + torch.where(grad_bias == 0, 0, operands.bias * grad_bias).sum() * operands.scale
    return (total / operands.scale).reshape(1)


def _of_rows(grad: Tensor, rows: Tensor, norms: Tensor | None, operands: Operands) -> Tensor:
    grad = grad * operands.scale
    return grad if norms is None else projected(grad, rows.to(grad.dtype), norms)


def _of_weight(grad: Tensor | None, operands: Operands) -> Tensor | None:
    if grad is None or operands.weight_norms is None:
        return grad
    return projected(grad, operands.weight.to(grad.dtype), operands.weight_norms)


def _rounded(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
