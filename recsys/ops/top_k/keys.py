"""Scores and items as one int64 number each, so that comparing numbers also settles ties.

The high half is the score's bits, made to rise with the score; the low half is what the item's index leaves
of 2^32 - 1: of equal scores the first item has the greatest number.
"""

import torch
from torch import Tensor

INDEX_BITS = 32
LAST_ITEM = 2**INDEX_BITS - 1


def keys_of(scores: Tensor, items: Tensor) -> Tensor:
    """int64, in the order of float32 scores, and for equal scores in the reverse order of items."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (rising << INDEX_BITS) + (LAST_ITEM - items)


def scores_of(keys: Tensor) -> Tensor:
    """float32."""
    rising = (keys >> INDEX_BITS).int()
    return torch.where(rising < 0, rising ^ 0x7FFFFFFF, rising).view(torch.float32)


def items_of(keys: Tensor) -> Tensor:
    """int64."""
    return LAST_ITEM - (keys & LAST_ITEM)
