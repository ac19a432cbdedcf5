"""Defines `linear_logp`: log-probabilities of a softmax over a large linear layer, without holding all its
scores.

`linear_lse` is the same without a true class, for positives that are not rows of the weight.
`linear_logp_sharded` shards the rows of the weight over the ranks of a process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.ops.linear_logp.recompute import SHORTEST, Operands, Softmax, WeightShard, is_row
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_float, check_number, kind_of
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "LinearLogp", "linear_logp", "linear_logp_sharded", "linear_lse"]


NOTHING = -(2**31)
"""Replaces the given `ignore_index` internally where that is a row of the weight."""


@dataclass(frozen=True)
class LogpFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtype: torch.dtype
    width: int
    weight_size: int = 0
    """Number of entries of the weight; 0 in a traced graph, where it may be symbolic."""
    has_bias: bool = False
    has_ids: bool = False


class LinearLogp(NamedTuple):
    """Two values per row, float32 (float64 for float64 inputs)."""

    logp: Tensor
    """[N], the log-probability of the row's target."""
    lse: Tensor
    """[N], the log of the sum of the exponentials of the row's scores."""


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    candidate_ids: Tensor | None = None,
    target_ids: Tensor | None = None,
    ignore_index: int = -100,
    l2_normalize: bool = False,
    backend: str = "auto",
) -> LinearLogp:
    """Computes `log_softmax((hidden weight^T + bias) / temperature)[i, target[i]]` and row-wise log-sum-exps.

    The scores are computed block by block, and again in backward, so only a few numbers per row are stored.
    With ids, the sum of a row leaves out every row of the weight that has the id of the row's target (an
    accidental hit among sampled negatives), but never the target itself.

    Args:
        hidden: [N, D] floating point.
        weight: [V, D], dtype and device of `hidden`.
        target: [N] int64, rows of `weight`, or `ignore_index`.
        bias: [V] floating point; for sampled candidates -log of their frequency (logQ correction). -inf
            removes a candidate.
        temperature: above 0; a one-element tensor may require a gradient.
        candidate_ids, target_ids: [V] and [N] int64, both or neither.
        ignore_index: the target of rows that do not count: their logp is 0, and they contribute no gradient.
        l2_normalize: divides the rows of hidden and weight by their norms (at least 1e-6), in float32 or
            wider. Gradients are with respect to the rows as given.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        logp and lse, differentiable in hidden, weight, bias and temperature; everything is bitwise
        repeatable. Any other target outside [0, V) raises where targets are on the host. On a device, where a
        check would have to wait, its logp is NaN and it contributes no gradient.

    Raises:
        TypeError, ValueError: naming the argument, and the row of a wrong target.

    Source: the online normaliser of Milakov and Gimelshein, arXiv 1805.02867; logQ correction and accidental
    hits: Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019.
    """
    operands = operands_of(hidden, weight, target, bias, temperature, candidate_ids, target_ids)
    target, ignore_index = checked(target, weight.shape[0], ignore_index)
    return run(operands._replace(target=target), l2_normalize, backend, WeightShard(ignore_index))


def linear_lse(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    candidate_ids: Tensor | None = None,
    target_ids: Tensor | None = None,
    l2_normalize: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes the `lse` [N] of `linear_logp` for targets that are not rows of `weight`.

    Every accidental hit is left out. Rows for which no candidate remains are -inf, without a gradient.
    Arguments and errors are those of `linear_logp`.
    """
    operands = operands_of(hidden, weight, None, bias, temperature, candidate_ids, target_ids)
    return run(operands, l2_normalize, backend, WeightShard(None)).lse


def linear_logp_sharded(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    first_row: int,
    num_rows: int,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    l2_normalize: bool = False,
    backend: str = "auto",
) -> LinearLogp:
    """Computes `linear_logp` over the concatenated weight rows of all ranks, each of which trains its rows.

    Every rank computes the maximum, the sum and the target's score of each row over its candidates;
    reductions of [N] and [2, N] numbers merge them. Backward reduces the gradient of hidden, [N, D].

    All ranks of the group call it, and call its backward, with the same `hidden`, `target` and temperature
    and the same loss on top, as if each held the whole weight. Gradients of hidden and temperature are
    complete and equal on every rank; that of weight is this rank's own.

    Args:
        hidden: [N, D] floating point.
        weight: [V of this rank, D]; may have no rows.
        target: [N] int64, rows of the whole weight, or `ignore_index`.
        group: process group of the ranks.
        first_row: index of this rank's first row in the whole weight.
        num_rows: number of rows of the whole weight.
        temperature, ignore_index, l2_normalize, backend: as in `linear_logp`.

    Raises:
        TypeError, ValueError: as `linear_logp`, and for rows outside the whole weight.
    """
    operands = operands_of(hidden, weight, target, None, temperature, None, None)
    if not 0 <= first_row <= first_row + weight.shape[0] <= num_rows:
        raise ValueError(
            f"first_row = {first_row} and the {weight.shape[0]} rows of weight must lie within the "
            f"num_rows = {num_rows} of all ranks"
        )
    target, ignore_index = checked(target, num_rows, ignore_index)
    shard = WeightShard(ignore_index, num_rows, first_row, group)
    return run(operands._replace(target=target), l2_normalize, backend, shard)


def run(operands: Operands, l2_normalize: bool, backend: str, shard: WeightShard) -> LinearLogp:
    """Runs the backend that the facts allow; the operands have been validated."""
    if not isinstance(l2_normalize, bool):
        raise TypeError(f"l2_normalize must be a bool, got {type(l2_normalize).__name__}")
    loops = OP.select(facts_of(operands), backend).backend()
    if l2_normalize:
        hidden_norms, weight_norms = norms_of(operands.hidden, operands.weight)
        operands = operands._replace(hidden_norms=hidden_norms, weight_norms=weight_norms)
    return LinearLogp(*Softmax.apply(*operands, loops, shard))


def facts_of(operands: Operands) -> LogpFacts:
    """Returns the static facts of a call."""
    hidden, weight = operands.hidden, operands.weight
    return LogpFacts(
        device=hidden.device.type,
        dtype=hidden.dtype,
        width=int(hidden.shape[1]),
        weight_size=0 if torch.compiler.is_compiling() else weight.numel(),
        has_bias=operands.bias is not None,
        has_ids=operands.candidate_ids is not None,
    )


def checked(target: Tensor, num_rows: int, ignore_index: int) -> tuple[Tensor, int]:
    """Returns the targets, and an `ignore_index` that is not a row of the weight.

    Raises:
        TypeError: if `ignore_index` is no int.
        ValueError: if a target is neither a row of the weight nor `ignore_index`; checked on the host only.
    """
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        refused = ~is_row(target, num_rows) & (target != ignore_index)
        if refused.any():
            row = int(refused.nonzero()[0])
            raise ValueError(
                f"target of row {row} is {int(target[row])}, which is not a row of weight: allowed are 0 to "
                f"{num_rows - 1}, or ignore_index = {ignore_index} for a row without a target"
            )
    if ignore_index < 0:
        return target, ignore_index
    return torch.where(target == ignore_index, NOTHING, target), NOTHING


def norms_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the inverse norms of the rows of hidden and of weight, in the dtype of the sums."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        norms = (torch.linalg.vector_norm(rows, dim=1, dtype=wide) for rows in (hidden, weight))
        first, second = (norm.clamp(min=SHORTEST).reciprocal() for norm in norms)
    return first, second


def inverse_of(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """Returns 1 / temperature as a tensor [1] in the dtype of the sums."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return temperature.to(wide).reshape(1).reciprocal()
    return torch.full((1,), 1 / temperature, dtype=wide, device=hidden.device)


def operands_of(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    temperature: float | Tensor,
    candidate_ids: Tensor | None,
    target_ids: Tensor | None,
) -> Operands:
    """Validates all arguments but the values of targets, and returns them."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        check_float(name, tensor, "hidden", hidden)
        if tensor.dim() != 2 or tensor.shape[1] == 0:
            raise ValueError(f"{name} must have shape [rows, width], width > 0, got {tuple(tensor.shape)}")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight must have the width of hidden, {hidden.shape[1]}, got {weight.shape[1]}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight must have the dtype of hidden, {hidden.dtype}, got {weight.dtype}")
    if bias is not None:
        check_float("bias", bias, "hidden", hidden)
        _check_length("bias", bias, weight.shape[0], "rows of weight")
    _check_temperature(temperature, hidden)
    if (candidate_ids is None) != (target_ids is None):
        raise ValueError("candidate_ids and target_ids belong together: give both, or neither")
    of_rows, of_weight = (hidden.shape[0], "rows of hidden"), (weight.shape[0], "rows of weight")
    ids = (("target", target, of_rows), ("target_ids", target_ids, of_rows))
    for name, tensor, length in (*ids, ("candidate_ids", candidate_ids, of_weight)):
        if tensor is not None:
            _check_ids(name, tensor, hidden)
            _check_length(name, tensor, *length)
    scale = inverse_of(temperature, hidden)
    return Operands(hidden, weight, bias, scale, target, candidate_ids, target_ids)


def _check_ids(name: str, tensor: object, hidden: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {kind_of(tensor)}")
    if tensor.device != hidden.device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")


def _check_length(name: str, tensor: Tensor, length: int, of: str) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(f"{name} must have shape [{length}], the {of}, got {tuple(tensor.shape)}")


def _check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, positive=True)
        return
    check_float("temperature", temperature, "hidden", hidden)
    if temperature.numel() != 1:
        raise ValueError(f"temperature must hold one number, got shape {tuple(temperature.shape)}")
    if temperature.device.type == "cpu" and not torch.compiler.is_compiling() and not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature.item()}")


MAX_WIDTH = {2: 512, 4: 128}
"""Widest rows of hidden that the Triton backend takes, in columns, by bytes per entry."""

LIBRARY_FROM = 64
"""Width in columns above which the library's float32 products are faster, forward and backward together."""


def supports_triton(facts: LogpFacts) -> Support:
    """Supports what `triton_support.support` does, up to `MAX_WIDTH`: a program holds whole rows of its
    operand.

    "auto" leaves wide float32 rows to the reference, whose library products are faster.
    """
    able = triton_support.support(facts.device, facts.dtype)
    if facts.dtype.itemsize == 4 and facts.width > LIBRARY_FROM:
        able = able._replace(auto=False)
    if not able.ok or facts.width <= (max_width := MAX_WIDTH[facts.dtype.itemsize]):
        return able
    reason = f"hidden has {facts.width} columns, in {facts.dtype} it takes up to {max_width}"
    return able._replace(ok=False, reason=reason)


WIDEST_ON_HOPPER = 512
"""Widest rows, in columns, for which `hopper` has block sizes."""

LEAST_WEIGHT = 1 << 24
"""Entries of the weight (items x columns) from which on "auto" takes the Hopper backend.

Speedup over the Triton backend in wall-clock time, forward and backward, unit vectors, on one H200: 0.82 to
0.91 with up to 100,000 x 64 entries, where the host limits a call (1.27 to 1.36 in GPU time alone); 1.71 with
100,000 x 256, 1.86 with 100,000 x 512, 1.94 with 1,000,000 x 128. Without normalization: 1.06 to 1.19
(experiments/2026-11-23-fewer-forms).
"""


def supports_sm90(facts: LogpFacts) -> Support:
    """Supports 16-bit operands without bias and ids on a Hopper GPU; "auto" also requires `LEAST_WEIGHT`.

    Each pass copies rows that have to be normalized or whose size in bytes is no multiple of 16. Normalized
    rows are rounded once more than in the Triton backend.
    """
    able = triton_support.hopper_support(facts.device, facts.dtype)
    if facts.weight_size < LEAST_WEIGHT:
        able = able._replace(auto=False)
    missing = _missing_from_the_call(facts) if able.ok else ""
    return able._replace(ok=False, reason=missing) if missing else able


def _missing_from_the_call(facts: LogpFacts) -> str:
    for present, what in (
        (facts.has_bias, "it adds no bias"),
        (facts.has_ids, "it compares no ids"),
        (facts.dtype.itemsize != 2, f"it takes bfloat16 and float16, not {facts.dtype}"),
        (
            facts.width > WIDEST_ON_HOPPER,
            f"hidden has {facts.width} columns, it takes up to {WIDEST_ON_HOPPER}",
        ),
        (torch.compiler.is_compiling(), "a graph cannot hold it"),
    ):
        if present:
            return what
    return ""


OP = Op("linear_logp", __name__, backends=("sm90", "triton", "reference"))
