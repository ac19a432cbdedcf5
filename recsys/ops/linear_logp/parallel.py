"""`linear_logp` with the rows of the weight spread over ranks, each of which keeps and trains its own.

Every rank computes the maximum, the sum and the target's score of each row over its candidates; reductions of
[N] and [2, N] numbers make them those of the whole. Backward reduces the gradient of hidden, [N, D].
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from recsys.ops.linear_logp import (
    OP,
    LinearLogp,
    inverse_of,
    logp_facts,
    rows_of,
    with_wrong_shown,
)
from recsys.ops.linear_logp.recompute import Softmax


def linear_logp_sharded(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    first_row: int,
    num_rows: int,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    candidate_ids: Tensor | None = None,
    target_ids: Tensor | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
) -> LinearLogp:
    """`linear_logp` over the weights of all ranks, one below the other.

    All ranks of the group call it, and call its backward, with the same `hidden`, `target`, `target_ids` and
    temperature and the same loss behind it, as if each held the whole weight. Gradients of hidden and
    temperature are the whole ones, the same on every rank; those of weight and bias are this rank's own.

    Args:
        hidden: [N, D] floating point.
        weight: [V of this rank, D], perhaps without rows.
        target: [N] int64, rows of the whole weight, or `ignore_index`.
        group: the ranks.
        first_row: of this rank in the whole weight.
        num_rows: of the whole weight.
        bias, candidate_ids: [V of this rank].
        temperature, target_ids, ignore_index, backend: as of `linear_logp`.

    Raises:
        TypeError, ValueError: as `linear_logp`, and for rows that are not within the whole weight.
    """
    facts = logp_facts(
        hidden,
        weight,
        target,
        bias=bias,
        temperature=temperature,
        candidate_ids=candidate_ids,
        target_ids=target_ids,
        ignore_index=ignore_index,
    )
    if not 0 <= first_row <= first_row + weight.shape[0] <= num_rows:
        raise ValueError(
            f"first_row = {first_row} and the {weight.shape[0]} rows of weight must lie within the "
            f"num_rows = {num_rows} of all ranks"
        )
    rows = rows_of(target, num_rows, ignore_index)
    options = (OP.select(facts, backend).PIECES, group, first_row)
    scale = inverse_of(temperature, hidden)
    logp, lse = Softmax.apply(hidden, weight, bias, scale, rows, candidate_ids, target_ids, *options)
    return LinearLogp(with_wrong_shown(logp, target, rows, ignore_index), lse)
