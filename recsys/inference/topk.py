"""The best items of the whole catalogue for each query: exact, in blocks.

Scores are inner products of query and item vectors. A block of items is scored and history is struck out; the
best groups of the block, by their best item, hold its best items, so only those are sorted and merged with
the best so far. Memory is B x (block + 64 k) at any size of catalogue, and nothing waits for the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 65_536
"""Items scored together; 65,536 x 256 queries of float32 are 64 MiB."""

GROUP = 64
"""Neighbouring items that are first looked at as one."""

_INDEX_BITS = 32
_MOST_ITEMS = 2**_INDEX_BITS


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
        queries: [B, E] float32, on any device.
        items: [V, E] float32, on the same device; fewer than 2^32.
        k: items wanted of each query, at least 1.
        removed: [R] int64 on the host, indices of items that must not be found, query after query; others
            than 0..V-1 are passed over.
        removed_lengths: [B] int64 on the host, how many of `removed` belong to each query.
        block: items scored together.

    Returns:
        On the device of the queries.

    Raises:
        ValueError: shapes, types or devices that do not fit, or k < 1.
    """
    _check(queries, items, k, removed, removed_lengths)
    best = _keys(queries.new_full((len(queries), k), -torch.inf), queries.new_zeros(k, dtype=torch.int64))
    nothing = queries.new_full((), -torch.inf)
    gone = _by_block(removed, removed_lengths, len(items), block, queries.device)
    for start, struck in zip(range(0, len(items), block), gone, strict=True):
        part = queries @ items[start : start + block].T
        part.index_put_((struck.query, struck.item), nothing)
        found = _best_of_block(part, start, k)
        best = torch.topk(torch.cat([best, found], dim=1), k, dim=1).values
    scores = _scores(best)
    return TopK(scores, _items(best).masked_fill(scores == -torch.inf, -1))


def _check(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> None:
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 item must be asked for")
    if queries.dim() != 2 or items.dim() != 2 or queries.shape[1] != items.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} and items {tuple(items.shape)} must be [B, E] and [V, E]"
        )
    if {queries.dtype, items.dtype} != {torch.float32} or queries.device != items.device:
        raise ValueError(
            f"queries ({queries.dtype}, {queries.device}) and items ({items.dtype}, {items.device}) must be "
            "float32 on one device"
        )
    if len(items) >= _MOST_ITEMS:
        raise ValueError(f"there are {len(items)} items; fewer than {_MOST_ITEMS} can be searched")
    if removed.device.type != "cpu" or removed_lengths.device.type != "cpu":
        raise ValueError("removed and removed_lengths must be on the host, where they are read")
    if removed_lengths.shape != (queries.shape[0],) or int(removed_lengths.sum()) != removed.shape[0]:
        raise ValueError(
            f"removed_lengths must be {queries.shape[0]} numbers that add up to {removed.shape[0]}"
        )


class _Struck(NamedTuple):
    """int64 [n] each: what must not be found in a block, as row of the queries and place in the block."""

    query: Tensor
    item: Tensor


def _by_block(
    removed: Tensor, removed_lengths: Tensor, num_items: int, block: int, device: torch.device
) -> Iterator[_Struck]:
    """For each block what must not be found there, sorted out on the host and sent in one piece."""
    item, order = removed.sort()
    query = torch.repeat_interleave(removed_lengths)[order]
    starts = list(range(0, num_items, block))
    bounds = torch.searchsorted(item, torch.tensor([*starts, num_items])).tolist()
    pairs = torch.stack([query, item]).to(device, non_blocking=True)
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        yield _Struck(pairs[0, first:last], pairs[1, first:last] - start)


def _best_of_block(part: Tensor, start: int, k: int) -> Tensor:
    """Keys [B, up to k] of the best of some scores [B, n] of the items from `start` on.

    A group that is not among the k best ones, by its best score and then by place, has k items of other
    groups before each of its own.
    """
    queries, count = part.shape
    index = torch.arange(start, start + count, device=part.device)
    if count <= 2 * GROUP * k:
        return _largest(_keys(part, index), k)
    num_groups = -(-count // GROUP)
    if count % GROUP:  # else it would be a copy
        part = F.pad(part, (0, -count % GROUP), value=-torch.inf)
    part = part.view(queries, num_groups, GROUP)
    groups = torch.arange(num_groups, device=part.device)
    chosen = _items(_largest(_keys(part.amax(dim=2), groups), k))
    scores = part.gather(1, chosen[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    members = (start + chosen * GROUP)[:, :, None] + torch.arange(GROUP, device=part.device)
    return _largest(_keys(scores, members.flatten(1)), k)


def _largest(keys: Tensor, k: int) -> Tensor:
    return torch.topk(keys, min(k, keys.shape[1]), dim=1).values


def _keys(scores: Tensor, items: Tensor) -> Tensor:
    """int64 numbers in the order of float32 scores, and for equal scores in the reverse order of items.

    The high half is the score's bits, made to rise with the score; the low half is what is left of 2^32 - 1.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (rising << _INDEX_BITS) + (_MOST_ITEMS - 1 - items)


def _scores(keys: Tensor) -> Tensor:
    rising = (keys >> _INDEX_BITS).int()
    return torch.where(rising < 0, rising ^ 0x7FFFFFFF, rising).view(torch.float32)


def _items(keys: Tensor) -> Tensor:
    return _MOST_ITEMS - 1 - (keys & (_MOST_ITEMS - 1))
