"""Checks of arguments that several ops share."""

from __future__ import annotations

import math

from torch import Tensor


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Checks for a finite int or float (not a bool, not a tensor), above 0 if `positive`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # A compiler can trace comparisons if a number is an attribute of a module.
    if not -math.inf < value < math.inf or (positive and value <= 0):
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, got {value}")


def check_float(name: str, tensor: object, like_name: str, like: Tensor) -> None:
    """Checks for a floating point tensor on the device of another tensor.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating point tensor, got {kind_of(tensor)}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, {like_name} on {like.device}")


def kind_of(value: object) -> str:
    """Describes the type of an argument for a message."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
