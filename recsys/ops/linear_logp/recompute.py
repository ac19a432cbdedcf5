"""What all backends of `linear_logp` share: the two outputs, and a backward that computes the scores again.

With z = (hidden weight^T + bias) scale, less accidental hits, m = max_j z and l = sum_j exp(z - m) of a row:

    lse = m + log l,     logp = (z[target] - m) - log l
    dz[j] = c exp(z[j] - m),     c = (d lse - d logp) / l
    dz[target] = d lse exp(logp) - d logp (exp(logp) - 1)

A backend has the two loops over scores: m, l and z[target] - m forward, and in backward the products of dz
with weight and hidden. dz of the target is worked out before, in float32 at least, so that p - 1 of a sure
target keeps its digits; it takes the place of what the loop finds before that is rounded. With norms, hidden
and weight stand for their rows times the inverse norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SHORTEST = 1e-6
"""Rows that are normalised and shorter than this are divided by it."""


class Operands(NamedTuple):
    """What scores are made of: sound, not empty. "wide" is the wider of float32 and the type of hidden."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V], any floating point type
    scale: Tensor  # [1] wide, 1 / temperature
    target: Tensor | None  # [N] int64, rows of the weight; any other number stands for none
    candidate_ids: Tensor | None  # [V] int64
    target_ids: Tensor | None  # [N] int64
    hidden_norms: Tensor | None = None  # [N] wide, inverse norms of the rows; both or neither
    weight_norms: Tensor | None = None  # [V] wide


class Parts(NamedTuple):
    """Of each row, over the rows of one weight: enough to merge several weights. [N] wide."""

    maximum: Tensor  # -inf where there is no candidate
    total: Tensor  # sum of exp(score - maximum)
    target_score: Tensor  # any number where there is no target


class Found(NamedTuple):
    """Of each row, over all rows of the weight. [N] wide."""

    maximum: Tensor
    total: Tensor
    logp: Tensor
    lse: Tensor


class Upstream(NamedTuple):
    """dz[i, j] = factor[i] exp(z[i, j] - maximum[i]), dz[i, target[i]] = of_target[i]. [N] wide, finite."""

    maximum: Tensor
    factor: Tensor
    of_target: Tensor


class Gradients(NamedTuple):
    """None where `Wanted` does not ask for it."""

    hidden: Tensor | None  # [N, D], wide: what is left of it may still be summed
    weight: Tensor | None  # [V, D], dtype of the weight
    bias: Tensor | None  # [V], wide
    scale: Tensor | None  # [1], wide; may still be summed


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    scale: bool


class Whole(NamedTuple):
    """What targets may say beside rows, and where the rows of a weight stand that is spread over ranks."""

    ignore_index: int | None
    num_rows: int | None = None  # of the weights of all ranks; None: there is one weight
    first_row: int = 0
    group: dist.ProcessGroup | None = None


class Pieces(NamedTuple):
    """A backend: its two loops, and the same as single nodes for traced graphs."""

    forward: Callable[[Operands], Parts]
    backward: Callable[[Operands, Upstream, Wanted], Gradients]
    forward_op: Callable[..., tuple[Tensor, ...]]
    """Of the fields of `Operands`."""
    backward_op: Callable[..., list[Tensor]]
    """Of the fields of `Operands` and `Upstream`, and a list with those of `Wanted`."""
    whole_forward: Callable[[Operands, int | None], Found] | None = None
    """Where a backend has fewer steps for a weight that is not spread: all of it, given `ignore_index`."""
    whole_backward: Callable[[Operands, Found, Tensor | None, Tensor | None, Wanted], Gradients] | None = None
    """The same, given the gradients of logp and lse as they come."""

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
        places = [sum(wanted[:index]) for index in range(len(wanted))]
        return Gradients(
            *(found[place] if want else None for place, want in zip(places, wanted, strict=True))
        )

    def takes_whole(self, operands: Operands, whole: Whole) -> bool:
        """Whether `whole_forward` and `whole_backward` are for this call."""
        if self.whole_forward is None or whole.group is not None or torch.compiler.is_compiling():
            return False
        return bool(operands.hidden.shape[0] and operands.weight.shape[0])


def fake_gradients(hidden: Tensor, weight: Tensor, scale: Tensor, wanted: list[bool]) -> list[Tensor]:
    """What a `backward_op` returns, without numbers."""
    found = (
        hidden.new_empty(hidden.shape, dtype=scale.dtype),
        weight.new_empty(weight.shape),
        scale.new_empty(weight.shape[0]),
        scale.new_empty(1),
    )
    return [gradient for gradient, want in zip(found, wanted, strict=True) if want]


class Softmax(torch.autograd.Function):
    """`apply(hidden, weight, bias, scale, target, candidate_ids, target_ids, pieces, whole, norms)`.

    target      [N] int64, rows of the whole weight; any other number stands for rows that do not count; None:
                there are no targets, and all rows count
    norms       inverse norms of the rows of hidden and weight, which are not differentiated: what is found
                is the gradient through the normalised rows
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
        whole: Whole,
        norms: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        own = target if target is None or not whole.first_row else target - whole.first_row
        operands = Operands(
            hidden, weight, bias, scale, own, candidate_ids, target_ids, *(norms or (None, None))
        )
        if pieces.takes_whole(operands, whole):
            found = pieces.whole_forward(operands, whole.ignore_index)
        else:
            found = _found(pieces.parts(operands), operands, target, whole)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *found, target)
        ctx.pieces, ctx.whole = pieces, whole
        return found.logp, found.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, maximum, total, logp, lse, target = ctx.saved_tensors
        operands, found = Operands(*saved), Found(maximum, total, logp, lse)
        wanted, whole = Wanted(*ctx.needs_input_grad[:4]), ctx.whole
        if ctx.pieces.takes_whole(operands, whole):
            made = ctx.pieces.whole_backward(operands, found, grad_logp, grad_lse, wanted)
        else:
            upstream = _upstream(grad_logp, grad_lse, found, operands, target, whole)
            made = ctx.pieces.gradients(operands, upstream, wanted)
        if whole.group is not None:
            for tensor in (made.hidden, made.scale):
                if tensor is not None:
                    dist.all_reduce(tensor, group=whole.group)
        return (
            None if made.hidden is None else made.hidden.to(operands.hidden.dtype),
            made.weight,
            None if made.bias is None else made.bias.to(operands.bias.dtype),
            made.scale,
            *(None for _ in range(6)),
        )


def is_row(target: Tensor, num_rows: int) -> Tensor:
    """[N] bool."""
    return (target >= 0) & (target < num_rows)


def projected(grad: Tensor, rows: Tensor, norms: Tensor) -> Tensor:
    """Gradient of rows from that of their normalised forms; all wide, `norms` the inverse ones.

    d row = r (g - row r^2 <row, g>), and r g for a row that is shorter than `SHORTEST`.
    """
    along = (rows * grad).sum(1) * norms.square()
    along = torch.where(is_clamped(norms), 0, along)
    return (grad - rows * along[:, None]) * norms[:, None]


def is_clamped(norms: Tensor) -> Tensor:
    """Of inverse norms: whether they are those of rows shorter than `SHORTEST`."""
    return norms >= 1 / SHORTEST


def _found(parts: Parts, operands: Operands, target: Tensor | None, whole: Whole) -> Found:
    """Over all ranks."""
    maximum, total, score = parts
    if whole.group is None:
        shifted = score - maximum
    else:
        maximum, total, shifted = _merged(parts, operands, whole.group)
    log_total = total.log()
    logp = torch.zeros_like(total) if target is None else shifted - log_total
    if target is not None:
        # A wrong target was refused before where one can see it; else it shows here.
        num_rows = operands.weight.shape[0] if whole.num_rows is None else whole.num_rows
        instead = torch.where(target == whole.ignore_index, 0, torch.nan).to(logp.dtype)
        logp = torch.where(is_row(target, num_rows), logp, instead)
    return Found(maximum, total, logp, maximum + log_total)


def _merged(parts: Parts, operands: Operands, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """maximum, total and z[target] - maximum over all ranks; the last is any number where nobody has it."""
    _, total, score = parts
    own = operands.target
    maximum = parts.maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    # A rank without a candidate for a row has total 0 and maximum -inf; that of all may be -inf too.
    here = torch.where(parts.maximum == -torch.inf, 0, total * (parts.maximum - maximum).exp())
    shifted = torch.zeros_like(here)
    if own is not None:
        shifted = torch.where(is_row(own, operands.weight.shape[0]), score - maximum, 0)
    both = torch.stack([here, shifted])
    dist.all_reduce(both, group=group)
    return maximum, both[0], both[1]


def _upstream(
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    found: Found,
    operands: Operands,
    target: Tensor | None,
    whole: Whole,
) -> Upstream:
    of_target = torch.zeros_like(found.total)
    grad_logp = of_target if grad_logp is None else grad_logp
    grad_lse = of_target if grad_lse is None else grad_lse
    if target is not None and operands.target is not None:
        num_rows = operands.weight.shape[0] if whole.num_rows is None else whole.num_rows
        counts = is_row(target, num_rows)
        grad_logp, grad_lse = (torch.where(counts, grad, 0) for grad in (grad_logp, grad_lse))
        of_target = grad_lse * found.logp.exp() - grad_logp * found.logp.expm1()
        of_target = torch.where(is_row(operands.target, operands.weight.shape[0]), of_target, 0)
    else:
        grad_logp = torch.zeros_like(grad_lse)
    # Where no candidate is left all exponentials are 0, from any finite maximum.
    factor = torch.where(found.total > 0, (grad_lse - grad_logp) / found.total, 0)
    return Upstream(torch.where(found.maximum == -torch.inf, 0, found.maximum), factor, of_target)


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
        torch.zeros_like(scale) if wanted.scale else None,
    )
