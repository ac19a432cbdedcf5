"""What all backends of `linear_logp` share: the two outputs, and a backward that computes the scores again.

With z = (hidden weight^T + bias) scale, less accidental hits, m = max_j z and l = sum_j exp(z - m) of a row:

    lse = m + log l,     logp = (z[target] - m) - log l
    dz[j] = c exp(z[j] - m) + d logp [j = target],     c = (d lse - d logp) / l

A backend has the two loops over scores: m, l and z[target] - m forward, and in backward the products of dz
with weight and hidden. That p - 1 of a sure target keeps its digits is their one obligation: dz is formed in
float32 at least before it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Operands(NamedTuple):
    """What scores are made of: sound, not empty. "wide" is the wider of float32 and the type of hidden."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V], any floating point type
    scale: Tensor  # [1] wide, 1 / temperature
    target: Tensor | None  # [N] int64, rows of the weight, -1 for none
    candidate_ids: Tensor | None  # [V] int64
    target_ids: Tensor | None  # [N] int64


class Parts(NamedTuple):
    """Of each row, over the rows of one weight: enough to merge several weights. [N] wide."""

    maximum: Tensor  # -inf where there is no candidate
    total: Tensor  # sum of exp(score - maximum)
    target_score: Tensor  # any number where the target is -1


class Upstream(NamedTuple):
    """dz[i, j] = factor[i] exp(z[i, j] - maximum[i]) + of_target[i] [j = target[i]]. [N] wide, finite."""

    maximum: Tensor
    factor: Tensor
    of_target: Tensor  # 0 where the target is -1


class Gradients(NamedTuple):
    """None where `Wanted` does not ask for it."""

    hidden: Tensor | None  # [N, D], wide: what is left of it may still be summed
    weight: Tensor | None  # [V, D], dtype of the weight
    bias: Tensor | None  # [V], wide


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool


class Pieces(NamedTuple):
    """A backend: its two loops, and the same as single nodes for traced graphs."""

    forward: Callable[[Operands], Parts]
    backward: Callable[[Operands, Upstream, Wanted], Gradients]
    forward_op: Callable[..., tuple[Tensor, ...]]
    """Of the fields of `Operands`."""
    backward_op: Callable[..., list[Tensor]]
    """Of the fields of `Operands` and `Upstream`, and a list with those of `Wanted`."""

    def parts(self, operands: Operands) -> Parts:
        """`forward`; of no rows, or over no candidates, too."""
        if not operands.hidden.shape[0] or not operands.weight.shape[0]:
            return _no_parts(operands)
        if torch.compiler.is_compiling():
            return Parts(*self.forward_op(*operands))
        return self.forward(operands)

    def gradients(self, operands: Operands, upstream: Upstream, wanted: Wanted) -> Gradients:
        """`backward`; of no rows, or over no candidates, too."""
        if not operands.hidden.shape[0] or not operands.weight.shape[0]:
            return _no_gradients(operands, wanted)
        if not torch.compiler.is_compiling():
            return self.backward(operands, upstream, wanted)
        found = self.backward_op(*operands, *upstream, list(wanted))
        places = [sum(wanted[:index]) for index in range(3)]
        return Gradients(
            *(found[place] if want else None for place, want in zip(places, wanted, strict=True))
        )


def fake_gradients(hidden: Tensor, weight: Tensor, scale: Tensor, wanted: list[bool]) -> list[Tensor]:
    """What a `backward_op` returns, without numbers."""
    found = (
        hidden.new_empty(hidden.shape, dtype=scale.dtype),
        weight.new_empty(weight.shape),
        scale.new_empty(weight.shape[0]),
    )
    return [gradient for gradient, want in zip(found, wanted, strict=True) if want]


class Softmax(torch.autograd.Function):
    """`apply(hidden, weight, bias, scale, target, candidate_ids, target_ids, pieces, group, first_row)`.

    target      [N] int64, -1 for rows that do not count; None: there are no targets, and all rows count
    group       of the ranks over which the weight is spread, if it is; targets count from the first row of
                the first rank
    first_row   of this rank
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        target: Tensor | None,
        candidate_ids: Tensor | None,
        target_ids: Tensor | None,
        pieces: Pieces,
        group: dist.ProcessGroup | None,
        first_row: int,
    ) -> tuple[Tensor, Tensor]:
        own = None if target is None else _own_rows(target, first_row, weight.shape[0])
        operands = Operands(hidden, weight, bias, scale, own, candidate_ids, target_ids)
        maximum, total, shifted = _merged(pieces.parts(operands), own, group)
        log_total = total.log()
        lse = maximum + log_total
        logp = torch.zeros_like(lse) if target is None else torch.where(target < 0, 0, shifted - log_total)
        ctx.save_for_backward(*operands, maximum, total, target)
        ctx.pieces, ctx.group = pieces, group
        return logp, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *saved, maximum, total, target = ctx.saved_tensors
        operands = Operands(*saved)
        upstream = _upstream(grad_logp, grad_lse, operands.target, maximum, total, target)
        of_hidden, of_weight, of_bias, of_scale = ctx.needs_input_grad[:4]
        # z does not change when hidden, bias and temperature grow by the same factor: Euler's theorem has the
        # gradient of the scale in those of hidden and bias.
        has_bias = operands.bias is not None
        wanted = Wanted(of_hidden or of_scale, of_weight, has_bias and (of_bias or of_scale))
        found = ctx.pieces.gradients(operands, upstream, wanted)
        grad_hidden, grad_scale = found.hidden, None
        if of_scale:
            grad_scale = _of_scale(operands, found)
        if ctx.group is not None:
            for tensor in (grad_hidden if of_hidden else None, grad_scale):
                if tensor is not None:
                    dist.all_reduce(tensor, group=ctx.group)
        return (
            grad_hidden.to(operands.hidden.dtype) if of_hidden else None,
            found.weight,
            found.bias.to(operands.bias.dtype) if of_bias else None,
            grad_scale,
            *(None for _ in range(6)),
        )


def _own_rows(target: Tensor, first_row: int, num_rows: int) -> Tensor:
    """Targets as rows of this rank's part of the weight, -1 for those of other ranks."""
    own = target - first_row
    return torch.where((target >= first_row) & (own < num_rows), own, -1)


def _merged(
    parts: Parts, own: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """maximum, total and z[target] - maximum over all ranks; the last is any number where nobody has it."""
    maximum, total, score = parts
    if group is None:
        return maximum, total, score - maximum
    maximum = maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    # A rank without a candidate for a row has total 0 and maximum -inf; that of all may be -inf too.
    here = torch.where(parts.maximum == -torch.inf, 0, total * (parts.maximum - maximum).exp())
    shifted = torch.zeros_like(here) if own is None else torch.where(own < 0, 0, score - maximum)
    both = torch.stack([here, shifted])
    dist.all_reduce(both, group=group)
    return maximum, both[0], both[1]


def _upstream(
    grad_logp: Tensor,
    grad_lse: Tensor,
    own: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    target: Tensor | None,
) -> Upstream:
    of_target = torch.zeros_like(grad_logp)
    if target is not None and own is not None:
        grad_logp, grad_lse = (torch.where(target < 0, 0, grad) for grad in (grad_logp, grad_lse))
        grad_lse = grad_lse - grad_logp
        of_target = torch.where(own < 0, 0, grad_logp)
    # Where no candidate is left all exponentials are 0, from any finite maximum.
    factor = torch.where(total > 0, grad_lse / total, 0)
    return Upstream(torch.where(maximum == -torch.inf, 0, maximum), factor, of_target)


def _of_scale(operands: Operands, found: Gradients) -> Tensor:
    """[1], sum over i, j of dz[i, j] (hidden weight^T + bias)[i, j]."""
    total = (operands.hidden * found.hidden).sum()
    if operands.bias is not None:
        # A bias of -inf has a gradient of 0.
        total = total + torch.where(found.bias == 0, 0, operands.bias * found.bias).sum()
    return total / operands.scale


def _no_parts(operands: Operands) -> Parts:
    """Of no rows, or over no candidates."""
    empty = operands.scale.new_empty(operands.hidden.shape[0])
    return Parts(torch.full_like(empty, -torch.inf), torch.zeros_like(empty), torch.zeros_like(empty))


def _no_gradients(operands: Operands, wanted: Wanted) -> Gradients:
    hidden, weight, bias, scale = operands[:4]
    return Gradients(
        torch.zeros_like(hidden, dtype=scale.dtype) if wanted.hidden else None,
        torch.zeros_like(weight) if wanted.weight else None,
        torch.zeros_like(bias, dtype=scale.dtype) if wanted.bias else None,
    )
