"""Compares beam searches of several widths with the exact order of all items."""

from collections.abc import Iterable

import torch
from torch import Tensor

from recsys.models.item_writers import Histories, SequentialItems
from recsys.modules.beam_search import SeenItems

WIDTHS = (20, 50, 200, 512)
"""Widths that are always compared, besides that of the config."""


def beam_recall(
    writer: SequentialItems, histories: Histories, seen: SeenItems, k: int, widths: Iterable[int]
) -> dict[str, Tensor]:
    """Counts how many of the exact best items beams find.

    Args:
        writer: the decoder with the codes of all items, in evaluation mode.
        histories: states [B, E], or B encoded histories.
        seen: items to leave out.
        k: number of best items of a row; fewer if it has fewer left.
        widths: widths of beams; those below `k` are left out.

    Returns:
        By name, such as `recall@10/beam_50`: float64 [2], the items that the beam finds among its best `k`,
        and those that there are to find.
    """
    best = exact_best(writer, histories, seen, k)
    wanted = (best >= 0).sum().double()
    counts = {}
    for width in sorted(width for width in set(widths) if width >= k):
        items = writer.find(histories, width, seen).items[:, :k]
        hits = (best[:, :, None] == items[:, None]).any(2) & (best >= 0)
        counts[f"recall@{k}/beam_{width}"] = torch.stack([hits.sum().double(), wanted])
    return counts


def exact_best(writer: SequentialItems, histories: Histories, seen: SeenItems, k: int) -> Tensor:
    """Returns the `k` best items of each row by the scores of all, int64 [B, k]; -1 where it has fewer."""
    k = min(k, len(writer.trie.item))
    parts, start = [], 0
    for scores in writer.score_in_parts(histories):
        here = (seen.row >= start) & (seen.row < start + len(scores)) & (seen.item >= 0)
        scores[seen.row[here] - start, seen.item[here]] = -torch.inf
        top = scores.topk(k, dim=1)
        parts.append(torch.where(top.values == -torch.inf, -1, top.indices))
        start += len(scores)
    return torch.cat(parts)
