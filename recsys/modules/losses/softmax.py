"""Softmax over items: the loss of next-item retrieval, over the whole catalogue or over shared negatives.

Called by the retriever with vectors that it has already normalised (or not); the reader drew the negatives.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recsys import protos as pb
from recsys.modules.losses.base import Kind, widen
from recsys.registry import register

IGNORED = -1
"""The target of a query that has none: its loss is 0 and it moves nothing."""

BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Most scores held at once, by device; larger problems go block by block, recomputed in backward.

4 MiB of float32 stay in a CPU's cache; a GPU wants large blocks, 256 MiB.
"""


@register(pb.SoftmaxLoss)
class SoftmaxLoss(nn.Module):
    """-log softmax(<query, item> / temperature)[target], in float32 whatever the precision of the model."""

    kind: Kind = "retrieval"

    def __init__(self, config: pb.SoftmaxLoss):
        super().__init__()
        if not config.temperature > 0:
            raise ValueError(f"temperature: {config.temperature} is given; it must be above 0")
        self.temperature = config.temperature

    def forward(
        self,
        queries: Tensor,
        items: Tensor,
        targets: Tensor,
        *,
        positives: Tensor | None = None,
        item_ids: Tensor | None = None,
    ) -> Tensor:
        """Loss of each query.

        Whole catalogue: `items` holds every item and `targets` are rows of it.
        Shared negatives: `items` are drawn ones with the ids `item_ids`, `positives` are the targets' vectors
        and `targets` are ids in the numbering of `item_ids`. An item whose id is the query's own target is
        left out of that query's sum; the positive always counts, once.

        Args:
            queries: [M, E].
            items: [V, E].
            targets: [M] int64, rows of `items` or ids; IGNORED where a query has no target.
            positives: [M, E]; any finite value where the target is IGNORED.
            item_ids: [V] int64.

        Returns:
            [M] float32 (float64 for float64 queries), 0 where the target is IGNORED.

        Raises:
            ValueError: `positives` without `item_ids` or the reverse, or a target that is no row of `items`.
        """
        if (positives is None) != (item_ids is None):
            raise ValueError(
                "positives and item_ids belong together: give both for shared negatives, or neither"
            )
        # bfloat16 scores are too coarse for a small temperature, and p - 1 of a sure target would round to 0.
        with torch.autocast(queries.device.type, enabled=False):
            queries, items = widen(queries) / self.temperature, widen(items)
            if positives is None:
                _check_rows(targets, len(items))
                return _by_blocks(_full, queries, targets, None, (items,))
            return _by_blocks(_sampled, queries, targets, widen(positives), (items, item_ids))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def _full(queries: Tensor, targets: Tensor, positives: None, items: Tensor) -> Tensor:
    return F.cross_entropy(queries @ items.T, targets, ignore_index=IGNORED, reduction="none")


def _sampled(queries: Tensor, targets: Tensor, positives: Tensor, items: Tensor, item_ids: Tensor) -> Tensor:
    hit = targets[:, None] == item_ids
    negative = (queries @ items.T).masked_fill(hit, -torch.inf)
    positive = (queries * positives).sum(1, keepdim=True)
    first = torch.where(targets == IGNORED, IGNORED, 0)
    scores = torch.cat([positive, negative], 1)
    return F.cross_entropy(scores, first, ignore_index=IGNORED, reduction="none")


def _by_blocks(loss, queries: Tensor, targets: Tensor, positives: Tensor | None, shared: tuple) -> Tensor:
    """`loss` over blocks of queries; `shared` is the same for all of them."""
    most = BLOCK_SCORES.get(queries.device.type, BLOCK_SCORES["cuda"])
    size = max(1, most // max(1, len(shared[0])))
    if len(queries) <= size:
        return loss(queries, targets, positives, *shared)
    found = []
    for start in range(0, len(queries), size):
        block = slice(start, start + size)
        own = None if positives is None else positives[block]
        found.append(
            checkpoint(
                loss,
                queries[block],
                targets[block],
                own,
                *shared,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(found)


def _check_rows(targets: Tensor, num_items: int) -> None:
    # On an accelerator the look would wait for the device; there the gather's own bounds check stops the run.
    if targets.device.type != "cpu":
        return
    wrong = (targets < IGNORED) | (targets >= num_items)
    if wrong.any():
        query = int(wrong.nonzero()[0])
        raise ValueError(
            f"query {query}: target {int(targets[query])} is no row of the {num_items} items; "
            f"targets are 0 to {num_items - 1}, or {IGNORED} for a query without one"
        )
