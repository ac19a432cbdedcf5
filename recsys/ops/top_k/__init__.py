"""Defines `top_k`: the best items of a whole catalog for each query, by inner product, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "TopK", "top_k"]

ITEM_TYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_ITEMS = 2**32
"""Exclusive upper bound on the items of a catalog, so that 32 bits hold an index."""


@dataclass
class TopK:
    """Best items of each query, best first.

    Attributes:
        scores: [B, k] float32; -inf where a query has fewer than k items left.
        items: [B, k] int64, indices into the item vectors; -1 where a query has fewer than k items left.
    """

    scores: Tensor
    items: Tensor


@dataclass(frozen=True)
class TopKFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtype: torch.dtype
    """Dtype of the items."""
    width: int
    k: int


def top_k(
    queries: Tensor, items: Tensor, k: int, *, removed: Tensor, removed_lengths: Tensor, backend: str = "auto"
) -> TopK:
    """Computes the exact top-k items by inner product; equal scores are ordered by the item's index.

    A score is the inner product of float32 vectors, summed in float32 in an order that the backend chooses;
    the result is the exact top-k of those scores. Memory beyond the inputs is bounded for any size of
    catalog, and no call waits for the device.

    Args:
        queries: [B, E] float32, on any device.
        items: [V, E] float32, bfloat16 or float16, on the same device; V is less than 2^32.
        k: number of items to find for each query, at least 1.
        removed: [R] int64 on the host, indices of items that must not be found, query after query; indices
            outside 0..V-1 are ignored.
        removed_lengths: [B] int64 on the host, how many entries of `removed` belong to each query.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [B, k] tensors on the device of the queries. Items that score -inf are not found; no score may be NaN.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit, or k < 1.
    """
    facts = _facts(queries, items, k, removed, removed_lengths)
    return OP.select(facts, backend).run(queries, items, k, removed, removed_lengths)


def _facts(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopKFacts:
    """Validates the arguments for all backends and returns their static facts."""
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 item must be asked for")
    if queries.dim() != 2 or items.dim() != 2 or queries.shape[1] != items.shape[1]:
        raise ValueError(
            f"queries {tuple(queries.shape)} and items {tuple(items.shape)} must be [B, E] and [V, E]"
        )
    if queries.dtype != torch.float32 or items.dtype not in ITEM_TYPES:
        raise TypeError(
            f"queries ({queries.dtype}) must be float32, items ({items.dtype}) float32, bfloat16 or float16"
        )
    if queries.device != items.device:
        raise ValueError(f"queries are on {queries.device}, items on {items.device}: one device is needed")
    if len(items) >= MOST_ITEMS:
        raise ValueError(f"there are {len(items)} items; fewer than {MOST_ITEMS} can be searched")
    for name, tensor in (("removed", removed), ("removed_lengths", removed_lengths)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.int64:
            raise ValueError(
                f"{name} must be int64 on the host, where it is read; it is {tensor.dtype} on {tensor.device}"
            )
    if removed_lengths.shape != (queries.shape[0],) or int(removed_lengths.sum()) != removed.shape[0]:
        raise ValueError(
            f"removed_lengths must be {queries.shape[0]} numbers that add up to {removed.shape[0]}"
        )
    return TopKFacts(queries.device.type, items.dtype, int(queries.shape[1]), k)


MAX_WIDTH = 512
MAX_K = 256


def supports_triton(facts: TopKFacts) -> Support:
    """Supports what `triton_support.support` does, for rows that fit a program and up to `MAX_K` items per
    query."""
    able = triton_support.support(facts.device, facts.dtype)
    if not able.ok:
        return able
    if not 0 < facts.width <= MAX_WIDTH:
        reason = f"vectors have {facts.width} numbers, it takes 1 to {MAX_WIDTH}"
        return able._replace(ok=False, reason=reason)
    if facts.k > MAX_K:
        return able._replace(ok=False, reason=f"{facts.k} items are wanted, it finds up to {MAX_K}")
    return able


INDEX_BITS = 32
LAST_ITEM = 2**INDEX_BITS - 1


def keys_of(scores: Tensor, items: Tensor) -> Tensor:
    """Packs scores and items into int64 keys: comparing keys also breaks ties.

    The high half holds the bits of a float32 score in an order that rises with the score; the low half is
    2^32 - 1 minus the item's index, so that among equal scores the first item has the greatest key.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, to which it is equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (rising << INDEX_BITS) + (LAST_ITEM - items)


def scores_of(keys: Tensor) -> Tensor:
    """Returns the float32 scores of keys."""
    rising = (keys >> INDEX_BITS).int()
    return torch.where(rising < 0, rising ^ 0x7FFFFFFF, rising).view(torch.float32)


def items_of(keys: Tensor) -> Tensor:
    """Returns the int64 items of keys."""
    return LAST_ITEM - (keys & LAST_ITEM)


OP = Op("top_k", __name__, backends=("triton", "reference"))
