"""Computes `linear_logp` with the rows of the weight sharded over ranks, each of which stores and trains its
rows.

Every rank computes the maximum, the sum and the target's score of each row over its candidates; reductions of
[N] and [2, N] numbers merge them. Backward reduces the gradient of hidden, [N, D].
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from recsys.ops.linear_logp import LinearLogp, checked, operands_of, run
from recsys.ops.linear_logp.recompute import WeightShard


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
    """Computes `linear_logp` over the concatenated weight rows of all ranks.

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
