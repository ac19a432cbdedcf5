"""Defines `gated_norm`: norm, gate and dropout between the attention and the output projection of an STU
layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_float, check_number, kind_of
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "new_seed", "gated_norm"]

GATES = ("ugn", "concat")


@dataclass(frozen=True)
class GateFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtype: torch.dtype
    group_width: int


class GateOptions(NamedTuple):
    """The numbers of a call."""

    num_groups: int
    eps: float
    concat: bool
    dropout: float
    silu: bool = False


class GateInputs(NamedTuple):
    """The tensors of a call; the seed is None without dropout."""

    attended: Tensor
    u: Tensor
    weight: Tensor
    bias: Tensor
    seed: Tensor | None


def gated_norm(
    attended: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    num_groups: int = 1,
    eps: float = 1e-6,
    gate: Literal["ugn", "concat"] = "concat",
    dropout: float = 0.0,
    seed: Tensor | None = None,
    silu: bool = False,
    grad_buffer: GradientBuffer | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes `drop(u * norm(a))` for the gate "ugn", `drop(cat([u, a, u * norm(a)]))` for "concat".

    `norm(a) = (a - mean) / sqrt(variance + eps) * weight + bias`, with mean and (biased) variance of each
    row, or of each group of a row. `drop` sets an entry to 0 with probability `dropout` and divides the
    others by `1 - dropout`. The choice depends only on the seed and on the entry's row and column, the same
    in every backend (see `reference`), so no mask is stored for backward.

    Args:
        attended: a, [T, W] floating point, the output of the attention.
        u: [T, W], dtype and device of `attended`.
        weight, bias: [W] floating point.
        num_groups: number of equal groups of columns: 1 for a layer norm, the number of heads for a norm per
            head.
        eps: added to the variance.
        dropout: probability in [0, 1); 0 in evaluation.
        seed: int64 [1] on the device of `attended`; None draws one from the device's default generator.
        silu: uses `silu(u)` instead of u.
        grad_buffer: buffer where a backend may put the gradient of `u`, whose tensor contains `u`.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, W] or [T, 3 W], dtype of `attended`, computed in the wider of its dtype and the weight's. The
        gradients in `attended`, `u`, `weight` and `bias` are bitwise repeatable, too.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the STU layer of Zhai et al., Actions Speak Louder than Words (HSTU), arXiv 2402.17152.
    """
    if gate not in GATES:
        raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    options = GateOptions(num_groups, eps, gate == "concat", dropout, silu)
    chosen = OP.select(_facts(GateInputs(attended, u, weight, bias, seed), options), backend)
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = new_seed(attended.device)
    return chosen.run(GateInputs(attended, u, weight, bias, seed), grad_buffer, options)


def new_seed(device: torch.device) -> Tensor:
    """Returns a seed, int64 [1], drawn from the device's default generator."""
    return torch.randint(2**63 - 1, (1,), device=device)


def _facts(inputs: GateInputs, options: GateOptions) -> GateFacts:
    """Validates the arguments for all backends and returns their static facts."""
    attended, u, weight, bias, seed = inputs
    for name, tensor in (("attended", attended), ("u", u), ("weight", weight), ("bias", bias)):
        check_float(name, tensor, "attended", attended)
    if attended.dim() != 2 or attended.shape[1] == 0:
        raise ValueError(f"attended must have shape [rows, width], width > 0, got {tuple(attended.shape)}")
    if u.shape != attended.shape:
        raise ValueError(f"u must have the shape of attended, {tuple(attended.shape)}, got {tuple(u.shape)}")
    if u.dtype != attended.dtype:
        raise TypeError(f"u must have the dtype of attended, {attended.dtype}, got {u.dtype}")
    width = int(attended.shape[1])
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tuple(tensor.shape) != (width,):
            raise ValueError(f"{name} must have shape [{width}], got {tuple(tensor.shape)}")
    if bias.dtype != weight.dtype:
        raise TypeError(f"bias must have the dtype of weight, {weight.dtype}, got {bias.dtype}")
    num_groups, eps, _, dropout, _ = options
    if isinstance(num_groups, bool) or not isinstance(num_groups, int):
        raise TypeError(f"num_groups must be an int, got {type(num_groups).__name__}")
    if num_groups < 1 or width % num_groups:
        raise ValueError(f"num_groups must divide the width {width}, got {num_groups}")
    check_number("eps", eps, positive=True)
    check_number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if seed is not None:
        _check_seed(seed, attended)
    return GateFacts(attended.device.type, attended.dtype, width // num_groups)


def _check_seed(seed: Tensor, attended: Tensor) -> None:
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        raise TypeError(f"seed must be an int64 tensor, got {kind_of(seed)}")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"seed must have shape [1], got {tuple(seed.shape)}")
    if seed.device != attended.device:
        raise ValueError(f"seed is on {seed.device}, attended on {attended.device}")


MAX_WIDTH = 4096


def supports_triton(facts: GateFacts) -> Support:
    """Supports what `triton_support.support` does, for groups of up to 4096 columns: a program holds whole
    groups."""
    able = triton_support.support(facts.device, facts.dtype)
    if able.ok and facts.group_width > MAX_WIDTH:
        reason = f"a group has {facts.group_width} columns, it takes up to {MAX_WIDTH}"
        return able._replace(ok=False, reason=reason)
    return able


OP = Op("gated_norm", __name__, backends=("triton", "reference"))
