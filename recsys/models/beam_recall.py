"""Compares beam searches of several widths with the exact order of all items."""

from collections.abc import Iterable

import torch
from torch import Tensor

from recsys.models.item_writers import SequentialItems
from recsys.modules.beam_search import SeenItems

WIDTHS = (20, 50, 200, 512)
"""Widths that are always compared, besides that of the config."""

MAX_NUMBERS = 2**25
"""Numbers of the widest level of exact scoring that are in memory at once: 128 MiB of float32."""


def beam_recall(
    writer: SequentialItems, states: Tensor, seen: SeenItems, k: int, widths: Iterable[int]
) -> dict[str, Tensor]:
    """Counts how many of the exact best items beams find.

    Args:
        writer: the decoder with the codes of all items, in evaluation mode.
        states: [B, E].
        seen: items to leave out.
        k: number of best items of a row; fewer if it has fewer left.
        widths: widths of beams; those below `k` are left out.

    Returns:
        By name, such as `recall@10/beam_50`: float64 [2], the items that the beam finds among its best `k`,
        and those that there are to find.
    """
    best = exact_best(writer, states, seen, k)
    wanted = (best >= 0).sum().double()
    counts = {}
    for width in sorted(width for width in set(widths) if width >= k):
        items = writer.find(states, width, seen).items[:, :k]
        hits = (best[:, :, None] == items[:, None]).any(2) & (best >= 0)
        counts[f"recall@{k}/beam_{width}"] = torch.stack([hits.sum().double(), wanted])
    return counts


def exact_best(writer: SequentialItems, states: Tensor, seen: SeenItems, k: int) -> Tensor:
    """Returns the `k` best items of each row by the scores of all, int64 [B, k]; -1 where it has fewer."""
    trie = writer.trie
    k = min(k, len(trie.leaf))
    at_a_time = max(1, MAX_NUMBERS // (len(trie.leaf) * max(*trie.sizes, states.shape[1])))
    parts = []
    for start in range(0, len(states), at_a_time):
        scores = writer.score_items(states[start : start + at_a_time])
        here = (seen.row >= start) & (seen.row < start + len(scores)) & (seen.item >= 0)
        scores[seen.row[here] - start, seen.item[here]] = -torch.inf
        top = scores.topk(k, dim=1)
        parts.append(torch.where(top.values == -torch.inf, -1, top.indices))
    return torch.cat(parts) if parts else states.new_zeros(0, k, dtype=torch.int64)
