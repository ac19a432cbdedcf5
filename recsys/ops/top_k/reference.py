"""Implements the reference of `top_k` in plain PyTorch, a block of items at a time, on any device.

A block is scored without removed items. Groups of items are ranked by their best item; the best items of the
block are in the best k groups, so only those groups are sorted and merged with the best so far. Memory is B x
(block + 64 k).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys.ops.top_k import TopK, items_of, keys_of, scores_of

BLOCK = 65_536
"""Items scored together; with 256 queries their float32 scores take 64 MiB."""

GROUP = 64
"""Neighboring items that are first compared by their maximum."""


def run(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopK:
    """Runs `top_k`; the arguments have been validated."""
    best = keys_of(queries.new_full((len(queries), k), -torch.inf), queries.new_zeros(k, dtype=torch.int64))
    nothing = queries.new_full((), -torch.inf)
    removed_by_block = _by_block(removed, removed_lengths, len(items), queries.device)
    for start, struck in zip(range(0, len(items), BLOCK), removed_by_block, strict=True):
        part = queries @ items[start : start + BLOCK].float().T
        part.index_put_((struck.query, struck.item), nothing)
        block_best = _best_of_block(part, start, k)
        best = torch.topk(torch.cat([best, block_best], dim=1), k, dim=1).values
    scores = scores_of(best)
    return TopK(scores, items_of(best).masked_fill(scores == -torch.inf, -1))


class _Struck(NamedTuple):
    """Removed items of a block, int64 [n] each: row of the query and index in the block."""

    query: Tensor
    item: Tensor


def _by_block(
    removed: Tensor, removed_lengths: Tensor, num_items: int, device: torch.device
) -> Iterator[_Struck]:
    """Yields the removed items of each block, sorted on the host and sent to the device in one copy."""
    item, order = removed.sort()
    query = torch.repeat_interleave(removed_lengths)[order]
    starts = list(range(0, num_items, BLOCK))
    bounds = torch.searchsorted(item, torch.tensor([*starts, num_items])).tolist()
    pairs = torch.stack([query, item]).to(device, non_blocking=True)
    for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
        yield _Struck(pairs[0, first:last], pairs[1, first:last] - start)


def _best_of_block(part: Tensor, start: int, k: int) -> Tensor:
    """Returns keys [B, up to k] of the best scores of a block [B, n], whose items begin with `start`.

    Groups are ranked by their best score, then by position. Every item of a group outside the best k groups
    has at least k better items in other groups.
    """
    queries, count = part.shape
    index = torch.arange(start, start + count, device=part.device)
    if count <= 2 * GROUP * k:
        return _largest(keys_of(part, index), k)
    num_groups = -(-count // GROUP)
    if count % GROUP:  # otherwise padding would copy for nothing
        part = F.pad(part, (0, -count % GROUP), value=-torch.inf)
    part = part.view(queries, num_groups, GROUP)
    groups = torch.arange(num_groups, device=part.device)
    chosen = items_of(_largest(keys_of(part.amax(dim=2), groups), k))
    scores = part.gather(1, chosen[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    members = (start + chosen * GROUP)[:, :, None] + torch.arange(GROUP, device=part.device)
    return _largest(keys_of(scores, members.flatten(1)), k)


def _largest(keys: Tensor, k: int) -> Tensor:
    return torch.topk(keys, min(k, keys.shape[1]), dim=1).values
