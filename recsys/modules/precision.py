"""Determines the dtype of matrix products."""

import torch
from torch import Tensor

from recsys import protos as pb

COMPUTE_DTYPES = {pb.FP32: torch.float32, pb.BF16: torch.bfloat16, pb.FP16: torch.float16}
"""Dtype of matrix products by `model.precision`."""


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product of `x` would run under the current autocast."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
