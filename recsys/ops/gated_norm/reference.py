"""Implements the reference of `gated_norm` in plain PyTorch, on any device and in any float dtype.

Its random bits follow from a seed and a position, so that they can be recomputed at any time, on any device:

    bits(seed, row, column) = mix(mix(mix(row ^ low(seed)) + high(seed)) + column * 0x9E3779B9) mod 2^32

`low` and `high` are the halves of a 64-bit seed, and `mix` is a bijection of 32 bits in which each bit of the
result depends on each bit of the input. Rows and columns count modulo 2^32. The bits are not
cryptographically secure.

Source of `mix`: C. Wellons, "Prospecting for Hash Functions" (2018), the function lowbias32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops.gated_norm import GateInputs, GateOptions
from recsys.ops.runtime.autograd import GradientBuffer


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
        keep = kept(seed, out.shape[0], out.shape[1], options.dropout)
        out = torch.where(keep, out / (1 - options.dropout), 0)
    return out.to(attended.dtype)


def _norm(a: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> Tensor:
    if num_groups == 1:  # stores less for backward
        return F.layer_norm(a, a.shape[1:], weight, bias, eps)
    groups = a.unflatten(1, (num_groups, a.shape[1] // num_groups))
    return F.layer_norm(groups, groups.shape[2:], eps=eps).flatten(1) * weight + bias


MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SHIFTS = (16, 15, 16)
COLUMN_STEP = 0x9E3779B9
"""2^32 divided by the golden ratio."""


def threshold(probability: float) -> int:
    """Returns the unsigned number below which an entry's bits cause it to be dropped."""
    return min(round(probability * 2**32), 2**32 - 1)


def kept(seed: Tensor, num_rows: int, num_columns: int, probability: float) -> Tensor:
    """Returns bool [num_rows, num_columns]: True for entries that dropout with this `probability` keeps.

    Args:
        seed: int64 [1].
    """
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    row, column = (torch.arange(size, device=seed.device).to(torch.int32) for size in (num_rows, num_columns))
    key = _mix(_mix(row ^ low).add_(high))
    bits = _mix(key[:, None] + column * _signed(COLUMN_STEP))
    return bits.bitwise_xor_(_signed(2**31)) >= threshold(probability) - 2**31


def _mix(bits: Tensor) -> Tensor:
    """Applies `mix` in place. int32 holds the bits of an unsigned number: sums and products wrap around, and
    the sign bits that a shift fills in are masked off."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if multiplier is not None:
            bits.mul_(_signed(multiplier))
    return bits


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
