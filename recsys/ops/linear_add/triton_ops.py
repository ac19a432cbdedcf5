"""Projection, residual sum and their gradients as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.runtime.column_sums import column_sums, linear, weight_gradient


def forward(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_add` without gradients."""
    return _added(x, linear(y, weight, bias))


def forward_in_place(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`forward`, where x was: added to before it is rounded."""
    if bias is not None or x.dtype != y.dtype:
        return x.add_(linear(y, weight, bias))
    return x.addmm_(y, weight.to(y.dtype).t())


def _added(x: Tensor, branch: Tensor) -> Tensor:
    """The sum, in the memory of the branch if that will do."""
    return branch.add_(x) if x.dtype == branch.dtype else x + branch.to(x.dtype)


class LinearAdd(torch.autograd.Function):
    """`apply(x, y, weight, bias)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = weight.to(y.dtype)
        ctx.save_for_backward(y, rounded)
        ctx.parameter_dtype = weight.dtype
        if bias is None and x.dtype == y.dtype:
            return torch.addmm(x, y, rounded.t())
        return _added(x, F.linear(y, rounded, None if bias is None else bias.to(y.dtype)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad = grad_x.to(y.dtype)
        grad_weight = weight_gradient(grad, y, ctx.parameter_dtype) if needed[2] else None
        grad_bias = column_sums(grad_x).to(ctx.parameter_dtype) if needed[3] else None
        return grad_x, grad @ weight, grad_weight, grad_bias
