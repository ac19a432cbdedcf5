"""Keys: a score and an item in one int64, so that comparing keys also breaks ties.

The high half holds the score's bits in an order that rises with the score; the low half is 2^32 - 1 minus the
item's index, so that of equal scores the first item has the greatest key.
"""

import torch
from torch import Tensor

INDEX_BITS = 32
LAST_ITEM = 2**INDEX_BITS - 1


def keys_of(scores: Tensor, items: Tensor) -> Tensor:
    """Keys that rise with float32 scores and, for equal scores, fall with the item."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (rising << INDEX_BITS) + (LAST_ITEM - items)


def scores_of(keys: Tensor) -> Tensor:
    """The scores of keys, float32."""
    rising = (keys >> INDEX_BITS).int()
    return torch.where(rising < 0, rising ^ 0x7FFFFFFF, rising).view(torch.float32)


def items_of(keys: Tensor) -> Tensor:
    """The items of keys, int64."""
    return LAST_ITEM - (keys & LAST_ITEM)
