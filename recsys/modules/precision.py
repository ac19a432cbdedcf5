"""What type matrix products are in."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Of matrix products of x here and now."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
