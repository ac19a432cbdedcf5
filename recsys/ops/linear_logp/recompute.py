"""Defines the autograd function of `linear_logp` that all backends share; backward computes the scores again.

With z = (hidden weight^T + bias) scale, without accidental hits, and for each row m = max_j z and l = sum_j
exp(z - m):

    lse = m + log l,     logp = (z[target] - m) - log l
    dz[j] = c exp(z[j] - m),     c = (d lse - d logp) / l
    dz[target] = d lse exp(logp) - d logp (exp(logp) - 1)

A backend implements the two loops over scores: forward computes m, l and z[target], backward the products of
dz with weight and hidden. The gradient of the target's score is computed before the loop, in float32 or
wider, so that p - 1 keeps its digits for a confident target; it replaces the loop's value before rounding.
With norms, hidden and weight stand for their rows times the inverse norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SHORTEST = 1e-6
"""Lower bound on the norm by which a row is divided when it is normalized."""


class Operands(NamedTuple):
    """Validated inputs of the scores. "wide" below is the wider of float32 and the dtype of hidden."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V], any floating point dtype
    scale: Tensor  # [1] wide, 1 / temperature
    target: Tensor | None  # [N] int64, rows of the weight; any other value means no target
    candidate_ids: Tensor | None  # [V] int64
    target_ids: Tensor | None  # [N] int64
    hidden_norms: Tensor | None = None  # [N] wide, inverse norms of the rows; set both norms or neither
    weight_norms: Tensor | None = None  # [V] wide


class RowSums(NamedTuple):
    """Statistics per row over the candidates of one weight or shard; those of several shards can be merged.
    [N] wide."""

    maximum: Tensor  # -inf where there is no candidate
    total: Tensor  # sum of exp(score - maximum)
    target_score: Tensor  # arbitrary where there is no target


class RowOutputs(NamedTuple):
    """Outputs per row, and what backward needs, over all rows of the weight. [N] wide."""

    maximum: Tensor
    total: Tensor
    logp: Tensor
    lse: Tensor


class OutputGrads(NamedTuple):
    """Gradients of the outputs, expressed as those of the scores; [N] wide, finite.

    dz[i, j] = factor[i] exp(z[i, j] - maximum[i]), but dz[i, target[i]] = of_target[i].
    """

    maximum: Tensor
    factor: Tensor
    of_target: Tensor


class Gradients(NamedTuple):
    """Gradients that `RequestedGrads` asks for; the others are None."""

    hidden: Tensor | None  # [N, D], wide, since ranks may still sum it
    weight: Tensor | None  # [V, D], dtype of the weight
    bias: Tensor | None  # [V], wide
    scale: Tensor | None  # [1], wide, since ranks may still sum it


class RequestedGrads(NamedTuple):
    """Flags for the gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    scale: bool


class WeightShard(NamedTuple):
    """Target that means "ignore this row", and the position of this weight among the ranks' shards."""

    ignore_index: int | None
    num_rows: int | None = None  # rows of all shards together; None: the weight is not sharded
    first_row: int = 0
    group: dist.ProcessGroup | None = None


class Backend(NamedTuple):
    """A backend's two loops, and the same loops as single nodes of traced graphs."""

    forward: Callable[[Operands], RowSums]
    backward: Callable[[Operands, OutputGrads, RequestedGrads], Gradients]
    forward_op: Callable[..., tuple[Tensor, ...]]
    """`forward` as a node; takes the fields of `Operands`."""
    backward_op: Callable[..., list[Tensor]]
    """`backward` as a node; takes the fields of `Operands` and `OutputGrads` and the list of the fields of
    `RequestedGrads`."""
    fused_forward: Callable[[Operands, int | None], RowOutputs] | None = None
    """Whole forward pass in fewer launches, given `ignore_index`, for a weight that is not sharded."""
    fused_backward: (
        Callable[[Operands, RowOutputs, Tensor | None, Tensor | None, RequestedGrads], Gradients] | None
    ) = None
    """Whole backward pass in fewer launches, given the gradients of logp and lse."""

    def parts(self, operands: Operands) -> RowSums:
        """Runs `forward`, and also handles zero rows or zero candidates."""
        if not operands.hidden.shape[0] or not operands.weight.shape[0]:
            return _no_parts(operands)
        if torch.compiler.is_compiling():
            return RowSums(*self.forward_op(*operands))
        return self.forward(operands)

    def gradients(
        self, operands: Operands, output_grads: OutputGrads, requested: RequestedGrads
    ) -> Gradients:
        """Runs `backward`, and also handles zero rows or zero candidates."""
        if not operands.hidden.shape[0] or not operands.weight.shape[0]:
            return _no_gradients(operands, requested)
        if not torch.compiler.is_compiling():
            return self.backward(operands, output_grads, requested)
        grads = self.backward_op(*operands, *output_grads, list(requested))
        places = [sum(requested[:index]) for index in range(len(requested))]
        return Gradients(
            *(grads[place] if want else None for place, want in zip(places, requested, strict=True))
        )

    def can_fuse(self, operands: Operands, shard: WeightShard) -> bool:
        """Returns True if `fused_forward` and `fused_backward` can run this call."""
        if self.fused_forward is None or shard.group is not None or torch.compiler.is_compiling():
            return False
        return bool(operands.hidden.shape[0] and operands.weight.shape[0])


def rebuilt(arguments: Sequence[Any]) -> tuple[Operands, OutputGrads, RequestedGrads]:
    """Returns what `Backend.backward` takes from the flat arguments of a `backward_op`."""
    *tensors, requested = arguments
    count = len(Operands._fields)
    return Operands(*tensors[:count]), OutputGrads(*tensors[count:]), RequestedGrads(*requested)


def fake_gradients(hidden: Tensor, weight: Tensor, scale: Tensor, requested: list[bool]) -> list[Tensor]:
    """Returns empty tensors in the shapes that a `backward_op` returns, for tracing."""
    grads = (
        hidden.new_empty(hidden.shape, dtype=scale.dtype),
        weight.new_empty(weight.shape),
        scale.new_empty(weight.shape[0]),
        scale.new_empty(1),
    )
    return [gradient for gradient, want in zip(grads, requested, strict=True) if want]


class Softmax(torch.autograd.Function):
    """Autograd function, called as `apply(*operands, backend, shard)`.

    The targets of the operands are rows of the whole weight, of which this rank may hold a shard; rows with
    any other value do not count. Without targets all rows count. The norms are not inputs of the
    differentiation: the gradients of hidden and weight include the path through their norms.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands, (backend, shard) = Operands(*arguments[:-2]), arguments[-2:]
        target = operands.target
        if target is not None and shard.first_row:
            operands = operands._replace(target=target - shard.first_row)
        if backend.can_fuse(operands, shard):
            outputs = backend.fused_forward(operands, shard.ignore_index)
        else:
            outputs = _outputs(backend.parts(operands), operands, target, shard)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *outputs, target)
        ctx.backend, ctx.shard = backend, shard
        return outputs.logp, outputs.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, maximum, total, logp, lse, target = ctx.saved_tensors
        operands, outputs = Operands(*saved), RowOutputs(maximum, total, logp, lse)
        requested, shard = RequestedGrads(*ctx.needs_input_grad[:4]), ctx.shard
        if ctx.backend.can_fuse(operands, shard):
            grads = ctx.backend.fused_backward(operands, outputs, grad_logp, grad_lse, requested)
        else:
            output_grads = _score_grads(grad_logp, grad_lse, outputs, operands, target, shard)
            grads = ctx.backend.gradients(operands, output_grads, requested)
        if shard.group is not None:
            for tensor in (grads.hidden, grads.scale):
                if tensor is not None:
                    dist.all_reduce(tensor, group=shard.group)
        return (
            None if grads.hidden is None else grads.hidden.to(operands.hidden.dtype),
            grads.weight,
            None if grads.bias is None else grads.bias.to(operands.bias.dtype),
            grads.scale,
            *(None for _ in range(7)),
        )


def is_row(target: Tensor, num_rows: int) -> Tensor:
    """Returns bool [N], True where the target is a row of the weight."""
    return (target >= 0) & (target < num_rows)


def projected(grad: Tensor, rows: Tensor, norms: Tensor) -> Tensor:
    """Computes the gradient of rows from the gradient of their normalized forms. All are wide; `norms` are
    inverse norms.

    d row = r (g - row r^2 <row, g>), and r g for a row that is shorter than `SHORTEST`.
    """
    along = (rows * grad).sum(1) * norms.square()
    along = torch.where(is_clamped(norms), 0, along)
    return (grad - rows * along[:, None]) * norms[:, None]


def is_clamped(norms: Tensor) -> Tensor:
    """Returns True for the inverse norms of rows that are shorter than `SHORTEST`."""
    return norms >= 1 / SHORTEST


def _outputs(parts: RowSums, operands: Operands, target: Tensor | None, shard: WeightShard) -> RowOutputs:
    """Computes the outputs from the sums over this rank's candidates, merged over all ranks."""
    maximum, total, score = parts
    if shard.group is None:
        shifted = score - maximum
    else:
        maximum, total, shifted = _merged(parts, operands, shard.group)
    log_total = total.log()
    logp = torch.zeros_like(total) if target is None else shifted - log_total
    if target is not None:
        # On the host, wrong targets were refused before; on a device they become NaN here.
        num_rows = operands.weight.shape[0] if shard.num_rows is None else shard.num_rows
        instead = torch.where(target == shard.ignore_index, 0, torch.nan).to(logp.dtype)
        logp = torch.where(is_row(target, num_rows), logp, instead)
    return RowOutputs(maximum, total, logp, maximum + log_total)


def _merged(parts: RowSums, operands: Operands, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Merges maximum, total and z[target] - maximum over all ranks; the last is 0 where no rank has the
    target. There are targets."""
    _, total, score = parts
    maximum = parts.maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    # A rank without candidates has total 0 and maximum -inf.
    here = torch.where(parts.maximum == -torch.inf, 0, total * (parts.maximum - maximum).exp())
    shifted = torch.where(is_row(operands.target, operands.weight.shape[0]), score - maximum, 0)
    both = torch.stack([here, shifted])
    dist.all_reduce(both, group=group)
    return maximum, both[0], both[1]


def _score_grads(
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    outputs: RowOutputs,
    operands: Operands,
    target: Tensor | None,
    shard: WeightShard,
) -> OutputGrads:
    of_target = torch.zeros_like(outputs.total)
    grad_logp = of_target if grad_logp is None else grad_logp
    grad_lse = of_target if grad_lse is None else grad_lse
    if target is not None and operands.target is not None:
        num_rows = operands.weight.shape[0] if shard.num_rows is None else shard.num_rows
        counts = is_row(target, num_rows)
        grad_logp, grad_lse = (torch.where(counts, grad, 0) for grad in (grad_logp, grad_lse))
        of_target = grad_lse * outputs.logp.exp() - grad_logp * outputs.logp.expm1()
        of_target = torch.where(is_row(operands.target, operands.weight.shape[0]), of_target, 0)
    else:
        grad_logp = torch.zeros_like(grad_lse)
    # Where no candidate is left, all exponentials are 0 for any finite maximum.
    factor = torch.where(outputs.total > 0, (grad_lse - grad_logp) / outputs.total, 0)
    return OutputGrads(torch.where(outputs.maximum == -torch.inf, 0, outputs.maximum), factor, of_target)


def _no_parts(operands: Operands) -> RowSums:
    """Returns the sums for zero rows or zero candidates."""
    empty = operands.scale.new_empty(operands.hidden.shape[0])
    return RowSums(torch.full_like(empty, -torch.inf), torch.zeros_like(empty), torch.zeros_like(empty))


def _no_gradients(operands: Operands, requested: RequestedGrads) -> Gradients:
    hidden, weight, bias, scale = operands[:4]
    return Gradients(
        torch.zeros_like(hidden, dtype=scale.dtype) if requested.hidden else None,
        torch.zeros_like(weight) if requested.weight else None,
        torch.zeros_like(bias, dtype=scale.dtype) if requested.bias else None,
        torch.zeros_like(scale) if requested.scale else None,
    )
