"""Computes the exact rank of a target among all items of a catalogue, in bounded memory, for evaluation."""

import torch
from torch import Tensor

from recsys.ops import SequenceLayout


def rank_targets(
    queries: Tensor,
    items: Tensor,
    *,
    targets: Tensor,
    num_targets: Tensor,
    removed: Tensor,
    removed_layout: SequenceLayout,
    missed: Tensor,
    max_scores: int,
) -> Tensor:
    """Ranks each target: 1 + the number of other items, less removed ones, that do not score below it.

    Ids are rows of the item table: item k of `items` has id k + 1, and id 0 is no item. A score that is not
    a number counts against the target, like a tie.

    Args:
        queries: [B, E], one per row.
        items: [V, E], the catalogue.
        targets: int64 [N], the ids of all targets, row after row.
        num_targets: int64 [B], number of targets of each row.
        removed: int64 [U], ids that do not count for a row.
        removed_layout: the layout of `removed` over rows.
        missed: bool [N], targets that cannot be found, such as removed ones.
        max_scores: number of scores held in memory at once.

    Returns:
        int64 [N]; V + 1 for a target with id 0 or that is missed.
    """
    count, num_items = targets.shape[0], items.shape[0]
    rows = torch.arange(queries.shape[0], device=queries.device)
    row_of_target = torch.repeat_interleave(rows, num_targets, output_size=count)
    padded = removed_layout.padded_index()
    # One more column stands for id 0 and catches the padding too.
    removed_ids = torch.cat([removed, removed.new_zeros(1)])[padded.index]
    ranks = []
    for block in torch.arange(count, device=queries.device).split(max(1, max_scores // (num_items + 1))):
        target, row = targets[block], row_of_target[block]
        scores = torch.cat([queries.new_zeros(len(block), 1), queries[row] @ items.T], dim=1)
        target_scores = scores.gather(1, target[:, None])
        better = ~(scores < target_scores)
        better.scatter_(1, removed_ids[row], False).scatter_(1, target[:, None], False)
        better[:, 0] = False
        ranks.append(torch.where((target > 0) & ~missed[block], 1 + better.sum(1), num_items + 1))
    return torch.cat(ranks) if ranks else targets
