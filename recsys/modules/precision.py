"""Determines the dtype of matrix products."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product of `x` would run under the current autocast."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
