"""The best items of the whole catalogue for each query: exact, in blocks.

Scores are inner products of query and item vectors; a block of items is scored, history is struck out, and
the best of the block are merged with the best so far, so memory is B x (block + k) at any size of catalogue.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 65_536
"""Items scored together; 65,536 x 256 queries of float32 are 64 MiB."""


@dataclass
class TopK:
    """Best items of each query, best first.

    Attributes:
        scores: [B, k] float32; -inf where a query has fewer than k items left.
        items: [B, k] int64 index into the item vectors; -1 where a query has fewer than k items left.
    """

    scores: Tensor
    items: Tensor


def top_k(
    queries: Tensor, items: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor, block: int = BLOCK
) -> TopK:
    """Exact top-k by inner product, equal scores in order of the item's index.

    Args:
        queries: [B, E] float32.
        items: [V, E] float32.
        k: items wanted of each query, at least 1.
        removed: [R] int64 indices of items that must not be found, query after query; others than 0..V-1 are
            passed over.
        removed_lengths: [B] int64, how many of `removed` belong to each query.
        block: items scored together.

    Raises:
        ValueError: shapes that do not fit, or k < 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 item must be asked for")
    if queries.dim() != 2 or items.dim() != 2 or queries.shape[1] != items.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} and items {tuple(items.shape)} must be [B, E] and [V, E]"
        )
    if removed_lengths.shape != (queries.shape[0],) or int(removed_lengths.sum()) != removed.shape[0]:
        raise ValueError(
            f"removed_lengths must be {queries.shape[0]} numbers that add up to {removed.shape[0]}"
        )
    owner = torch.repeat_interleave(torch.arange(len(queries), device=queries.device), removed_lengths)
    scores = queries.new_full((len(queries), k), -torch.inf)
    found = removed.new_full((len(queries), k), -1)
    for start in range(0, len(items), block):
        part = queries @ items[start : start + block].T
        inside = (removed >= start) & (removed < start + part.shape[1])
        part[owner[inside], removed[inside] - start] = -torch.inf
        index = torch.arange(start, start + part.shape[1], device=queries.device).expand_as(part)
        scores, found = _best(torch.cat([scores, part], dim=1), torch.cat([found, index], dim=1), k)
    return TopK(scores, found.masked_fill(scores == -torch.inf, -1))


def _best(scores: Tensor, items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best columns of each row; `torch.topk` narrows the field and a stable sort by item settles ties.

    Ties at the edge of the list are settled by index too: whatever equals the k-th score competes for the
        last places.
    """
    if scores.shape[1] > k:
        edge = torch.topk(scores, k, dim=1).values[:, -1:]
        above, level = scores > edge, scores == edge
        room = k - above.sum(dim=1, keepdim=True)
        keep = above | (level & (level.cumsum(dim=1) <= room))
        column = torch.topk(keep.to(torch.int8), k, dim=1).indices.sort(dim=1).values
        scores, items = scores.gather(1, column), items.gather(1, column)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return scores.gather(1, order), items.gather(1, order)
