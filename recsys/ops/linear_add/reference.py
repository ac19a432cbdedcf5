"""Projection and sum in plain PyTorch: the definition of correct, on any device, float64 included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from recsys.ops.runtime.dispatch import SUPPORTED, Support


def supports(facts: object) -> Support:
    """Everything."""
    return SUPPORTED


def run(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, in_place: bool = False) -> Tensor:
    """One operation after the other."""
    branch = F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))
    return x.add_(branch) if in_place else x + branch.to(x.dtype)
