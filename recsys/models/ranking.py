"""Computes exact ranks of targets among all items of a catalogue in bounded memory, for evaluation."""

import torch
from torch import Tensor

from recsys.ops import SequenceLayout


def rank_targets(
    queries: Tensor,
    items: Tensor | None,
    *,
    targets: Tensor,
    num_targets: Tensor,
    removed: Tensor,
    removed_layout: SequenceLayout,
    missed: Tensor,
    max_scores: int,
) -> Tensor:
    """Ranks each target: 1 + the number of other items, except removed items, that do not score below it.

    Ids are rows of the item table: item k of `items` has id k + 1, and id 0 is not an item. A NaN score
    counts against the target, as does a tie.

    Args:
        queries: [B, E], one per row; [B, V], the scores of all items, if there are no vectors of items.
        items: [V, E], the catalogue; None if `queries` are scores.
        targets: int64 [N], the ids of all targets, row after row.
        num_targets: int64 [B], number of targets of each row.
        removed: int64 [U], ids of items that are left out for a row.
        removed_layout: layout of `removed` over rows.
        missed: bool [N], targets that cannot be found, such as removed items.
        max_scores: largest number of scores in memory at once.

    Returns:
        Ranks, int64 [N]; V + 1 for a target that has id 0 or is missed.
    """
    count = targets.shape[0]
    num_items = queries.shape[1] if items is None else items.shape[0]
    rows = torch.arange(queries.shape[0], device=queries.device)
    row_of_target = torch.repeat_interleave(rows, num_targets, output_size=count)
    padded = removed_layout.padded_index()
    # An additional column stands for id 0 and also takes the padding.
    removed_ids = torch.cat([removed, removed.new_zeros(1)])[padded.index]
    ranks = []
    for block in torch.arange(count, device=queries.device).split(max(1, max_scores // (num_items + 1))):
        target, row = targets[block], row_of_target[block]
        of_items = queries[row] if items is None else queries[row] @ items.T
        scores = torch.cat([queries.new_zeros(len(block), 1), of_items], dim=1)
        target_scores = scores.gather(1, target[:, None])
        better = ~(scores < target_scores)
        better.scatter_(1, removed_ids[row], False).scatter_(1, target[:, None], False)
        better[:, 0] = False
        ranks.append(torch.where((target > 0) & ~missed[block], 1 + better.sum(1), num_items + 1))
    return torch.cat(ranks) if ranks else targets
