"""Defines `norm_linear`: layer norm and projection into parts, the first half of an STU layer, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_float, check_number
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "NormLinear", "norm_linear"]


class NormLinear(NamedTuple):
    """Result of `norm_linear`.

    Attributes:
        parts: [T, width] each.
        x: the argument x again, to be used in the sum that ends a residual block: a backend adds the gradient
            of this output inside the kernel that computes the gradient of x.
        grad_buffer: where later ops put the gradients of `parts`; None if the backend wants no buffer.
    """

    parts: tuple[Tensor, ...]
    x: Tensor
    grad_buffer: GradientBuffer | None


class NormLinearInputs(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
    bias: Tensor


class NormLinearOptions(NamedTuple):
    """Everything else about a call but the widths; see `norm_linear`."""

    eps: float
    dtype: torch.dtype
    keep_normed: bool
    silu: bool


@dataclass(frozen=True)
class NormLinearFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtype: torch.dtype
    compute_dtype: torch.dtype
    width: int


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    widths: Sequence[int],
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    keep_normed: bool = True,
    silu: bool = False,
    backend: str = "auto",
) -> NormLinear:
    """Computes `split(norm(x) @ weight^T + bias)`, or `split(silu(...))`.

    `norm(x) = (x - mean) / sqrt(variance + eps) * norm_weight + norm_bias`. Row statistics and norm are
    computed in the wider of the dtypes of x and `norm_weight`; norm(x), weight and bias are then rounded to
    `dtype`.

    Args:
        x: [T, E] floating point.
        norm_weight, norm_bias: [E] floating point, of one dtype.
        weight: [N, E] floating point. bias: [N], dtype of weight.
        widths: columns of each part; they add up to N.
        eps: added to the (biased) variance.
        dtype: dtype of the product and of the result; None for that of x.
        keep_normed: if False, backward computes norm(x) again instead of storing it.
        silu: applies SiLU to all parts; backward then stores their values before it.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        The parts, side by side in memory, in `dtype`. Differentiable in x and all parameters, whose gradients
        have the parameters' dtypes; bitwise repeatable as far as the device's matrix products are.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    inputs = NormLinearInputs(x, norm_weight, norm_bias, weight, bias)
    facts = _facts(inputs, widths, eps, dtype)
    options = NormLinearOptions(eps, facts.compute_dtype, keep_normed, silu)
    return OP.select(facts, backend).run(inputs, tuple(widths), options)


def _facts(
    inputs: NormLinearInputs, widths: Sequence[int], eps: float, dtype: torch.dtype | None
) -> NormLinearFacts:
    """Validates the arguments for all backends and returns their static facts."""
    x, norm_weight, norm_bias, weight, bias = inputs
    for name, tensor in inputs._asdict().items():
        check_float(name, tensor, "x", x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x must have shape [tokens, width], width > 0, got {tuple(x.shape)}")
    width, columns = int(x.shape[1]), sum(widths)
    if not widths or min(widths) < 1:
        raise ValueError(f"widths must be positive numbers, got {list(widths)}")
    shapes = {"norm_weight": (width,), "norm_bias": (width,), "weight": (columns, width), "bias": (columns,)}
    for name, shape in shapes.items():
        actual = tuple(getattr(inputs, name).shape)
        if actual != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {actual}")
    for name, shift, scale in (("norm_bias", norm_bias, norm_weight), ("bias", bias, weight)):
        if shift.dtype != scale.dtype:
            raise TypeError(f"{name} must have the dtype of its weight, {scale.dtype}, got {shift.dtype}")
    check_number("eps", eps, positive=True)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point type, got {dtype}")
    return NormLinearFacts(x.device.type, x.dtype, dtype or x.dtype, width)


MAX_WIDTH = 4096


def supports_triton(facts: NormLinearFacts) -> Support:
    """Supports what `triton_support.support` does, in eager mode, for rows of up to 4096 columns: a program
    holds whole rows."""
    able = triton_support.support(facts.device, facts.dtype)
    if able.ok and facts.compute_dtype not in triton_support.DTYPES:
        able = able._replace(ok=False, reason=f"it computes in 16 or 32 bits, not {facts.compute_dtype}")
    if able.ok and torch.compiler.is_compiling():
        return able._replace(ok=False, reason="a compiler makes kernels of the reference", auto=False)
    if able.ok and facts.width > MAX_WIDTH:
        return able._replace(ok=False, reason=f"x is {facts.width} wide, it takes up to {MAX_WIDTH}")
    return able


OP = Op("norm_linear", __name__, backends=("triton", "reference"))
