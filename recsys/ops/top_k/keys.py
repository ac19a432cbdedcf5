"""Packs a score and an item into one int64 key, so that comparing keys also breaks ties.

The high half holds the score's bits in an order that rises with the score; the low half is 2^32 - 1 minus the
item's index, so that among equal scores the first item has the greatest key.
"""

import torch
from torch import Tensor

INDEX_BITS = 32
LAST_ITEM = 2**INDEX_BITS - 1


def keys_of(scores: Tensor, items: Tensor) -> Tensor:
    """Returns keys that rise with float32 scores and, for equal scores, fall with the item."""
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
