"""Implements the reference of `gated_norm` in plain PyTorch, on any device and in any float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.gated_norm import GateInputs, GateOptions, counter
from recsys.ops.runtime.gradient_buffer import GradientBuffer


def run(inputs: GateInputs, grad_buffer: GradientBuffer | None, options: GateOptions) -> Tensor:
    """Runs one operation after the other in the wider dtype and rounds once, at the end. Ignores the
    buffer."""
    attended, u, weight, bias, seed = inputs
    wide = torch.promote_types(attended.dtype, weight.dtype)
    a, factor = attended.to(wide), u.to(wide)
    if options.silu:
        factor = F.silu(factor)
    out = factor * _norm(a, weight.to(wide), bias.to(wide), options.num_groups, options.eps)
    if options.concat:
        out = torch.cat([factor, a, out], dim=1)
    if seed is not None:
        keep = counter.kept(seed, out.shape[0], out.shape[1], options.dropout)
        out = torch.where(keep, out / (1 - options.dropout), 0)
    return out.to(attended.dtype)


def _norm(a: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
    if num_groups == 1:  # stores less for backward
        return F.layer_norm(a, a.shape[1:], weight, bias, eps)
    groups = a.unflatten(1, (num_groups, a.shape[1] // num_groups))
    return F.layer_norm(groups, groups.shape[2:], eps=eps).flatten(1) * weight + bias
