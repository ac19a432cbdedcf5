"""Computes a softmax over a catalogue whose items are divided over ranks (vocabulary parallelism).

Every rank gathers the queries of all ranks and compares them with its own items; sums of a few numbers per
query then merge the parts (`ops.linear_logp.parallel`). What travels is queries and their gradients, not
items: for a catalogue of V items and N queries on each of R ranks, N x R instead of V rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from recsys.ops.linear_logp import linear_logp_sharded

# PyTorch 2.13 renamed the function, and warns about the earlier name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class CataloguePart:
    """A rank's part of the catalogue.

    Attributes:
        first: number of its first item.
        num_items: number of items of all ranks.
        rank, world_size: the rank among those that divide the catalogue, which are all of the process group.
    """

    first: int
    num_items: int
    rank: int
    world_size: int


def divided_logp(
    queries: Tensor,
    items: Tensor,
    targets: Tensor,
    part: CataloguePart,
    *,
    temperature: float | Tensor,
    ignore_index: int,
    l2_normalize: bool,
) -> Tensor:
    """Returns log softmax(<query, item> / temperature)[target] over the items of all ranks. Collective.

    Backward is collective too. Gradients of this rank's queries and items are those of the sum over all
    ranks. The gradient of a temperature is divided by the number of ranks, since every rank has the whole.

    Args:
        queries: [N, E] of this rank; ranks may have different N.
        items: [V of this rank, E].
        targets: [N] int64, numbers of items in the whole catalogue, or `ignore_index`.
        part: this rank's part.
        temperature, ignore_index, l2_normalize: as in `linear_logp`.

    Returns:
        [N] float32 (float64 for float64 queries).
    """
    count = queries.shape[0]
    missing = _largest(count) - count
    padded = F.pad(queries, (0, 0, 0, missing))
    all_targets = _gathered(F.pad(targets, (0, missing), value=ignore_index), part)
    if isinstance(temperature, Tensor):
        constant = temperature.detach()
        temperature = constant + (temperature - constant) / part.world_size
    logp = linear_logp_sharded(
        _GatherRows.apply(padded, part),
        items,
        all_targets,
        group=dist.group.WORLD,
        first_row=part.first,
        num_rows=part.num_items,
        temperature=temperature,
        ignore_index=ignore_index,
        l2_normalize=l2_normalize,
    ).logp
    return _RowsOfRank.apply(logp, part)[:count]


def _largest(count: int) -> int:
    """Returns the largest count of all ranks. The hosts agree on it; no device is waited for."""
    largest = torch.tensor([count])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _gathered(rows: Tensor, part: CataloguePart) -> Tensor:
    """Joins equally many rows of all ranks."""
    joined = rows.new_empty(part.world_size * rows.shape[0], *rows.shape[1:])
    _all_gather(joined, rows.contiguous())
    return joined


def _of_rank(joined: Tensor, part: CataloguePart) -> Tensor:
    return joined.view(part.world_size, -1, *joined.shape[1:])[part.rank]


class _GatherRows(torch.autograd.Function):
    """Joins the rows of all ranks. Every rank gets the same, complete gradient and keeps that of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: CataloguePart) -> Tensor:
        ctx.part = part
        return _gathered(rows, part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _of_rank(gradient, ctx.part), None


class _RowsOfRank(torch.autograd.Function):
    """Takes this rank's rows. Backward joins the gradients of all ranks, so that all have the same."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, part: CataloguePart) -> Tensor:
        ctx.part = part
        return _of_rank(joined, part).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.part), None
