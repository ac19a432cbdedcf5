"""`linear_add`: projection and residual sum, the end of an STU layer, as one op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops.runtime.dispatch import Op

__all__ = ["OP", "linear_add"]


@dataclass(frozen=True)
class LinearAddFacts:
    """All that a backend may know when it says whether it can run."""

    device: str
    dtype: torch.dtype


def linear_add(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    in_place: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`x + y @ weight^T + bias`; the product in the type of y, the sum in that of x.

    Args:
        x: [T, E] floating point.
        y: [T, K] floating point.
        weight: [E, K] floating point. bias: [E], its dtype.
        in_place: whether the sum may take the place of x, without gradients: cuBLAS then adds to what is
            there, and the sum costs nothing.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, E], dtype of x. Differentiable in all arguments; gradients of parameters have their types.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    facts = _facts(x, y, weight, bias)
    return OP.select(facts, backend).run(x, y, weight, bias, in_place and not torch.is_grad_enabled())


def _facts(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> LinearAddFacts:
    """The one validator of all backends, and what is left to know once the arguments are sound."""
    named = {"x": x, "y": y, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating point tensor, got {given}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {tuple(tensor.shape)}")
    if not torch.compiler.is_compiling() and y.shape[0] != x.shape[0]:
        raise ValueError(f"y must have the rows of x, {x.shape[0]}, got {y.shape[0]}")
    if tuple(weight.shape) != (x.shape[1], y.shape[1]):
        raise ValueError(
            f"weight must have shape {[int(x.shape[1]), int(y.shape[1])]}, got {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"bias must have shape {[int(x.shape[1])]}, got {tuple(bias.shape)}")
    if bias is not None and bias.dtype != weight.dtype:
        raise TypeError(f"bias must have the dtype of weight, {weight.dtype}, got {bias.dtype}")
    return LinearAddFacts(x.device.type, y.dtype)


OP = Op("linear_add", __name__, backends=("triton", "reference"), facts=_facts)
