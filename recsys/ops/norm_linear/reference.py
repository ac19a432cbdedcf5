"""Implements the reference of `norm_linear` in plain PyTorch, on any device and in any float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recsys.ops.norm_linear import NormLinear, NormLinearInputs, NormLinearOptions


def run(inputs: NormLinearInputs, widths: tuple[int, ...], options: NormLinearOptions) -> NormLinear:
    """Runs one operation after the other; makes no buffer for gradients."""
    x, norm_weight, norm_bias, weight, bias = inputs
    eps, dtype, keep_normed, silu = options

    def project(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, norm_weight.dtype))
        normed = F.layer_norm(wide, wide.shape[1:], norm_weight, norm_bias, eps).to(dtype)
        return F.linear(normed, weight.to(dtype), bias.to(dtype))

    if keep_normed or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        joined = project(x)
    else:
        joined = checkpoint(project, x, use_reentrant=False, preserve_rng_state=False)
    if silu:
        joined = F.silu(joined)
    return NormLinear(tuple(joined.split(widths, dim=1)), x, None)
