"""Checks on the host for the constructors of `SequenceLayout`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_INDEX = 2**63 - 1


def require_int_vector(name: str, value: object) -> Tensor:
    """Return the value if it is a one-dimensional int32 or int64 tensor.

    Raises:
        TypeError, ValueError: the value is something else; the message contains `name`.
    """
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        actual = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {actual}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(value.shape)}")
    return value


def check_samples(lengths: Tensor, num_targets: Tensor, num_contextual: int) -> None:
    """Check that a layout can have these lengths and targets, int64 [B] on the host.

    Raises:
        TypeError, ValueError: naming the sample.
    """
    if isinstance(num_contextual, bool) or not isinstance(num_contextual, int):
        raise TypeError(f"num_contextual must be an int, got {type(num_contextual).__name__}")
    if num_contextual < 0:
        raise ValueError(f"num_contextual must be >= 0, got {num_contextual}")
    if num_targets.shape != lengths.shape:
        raise ValueError(
            f"num_targets must have one entry a sample: {len(num_targets)} for {len(lengths)} lengths"
        )
    if _are_valid(lengths.numpy(), num_targets.numpy(), num_contextual):
        return
    for name, values in (("lengths", lengths), ("num_targets", num_targets)):
        if (sample := first_true(values < 0)) is not None:
            raise ValueError(f"{name} must be >= 0, but {name}[{sample}] = {int(values[sample])}")
    if len(lengths) and int(lengths.max()) > _MAX_INDEX // len(lengths):
        raise ValueError(
            f"lengths must add up to less than 2**63; the longest of {len(lengths)} is {int(lengths.max())}"
        )
    if (sample := first_true(lengths - num_targets < num_contextual)) is not None:
        raise ValueError(
            f"sample {sample} has lengths[{sample}] = {int(lengths[sample])} tokens, fewer than "
            f"num_contextual = {num_contextual} plus num_targets[{sample}] = {int(num_targets[sample])}"
        )


def _are_valid(lengths: NDArray[np.int64], num_targets: NDArray[np.int64], num_contextual: int) -> bool:
    """Return whether lengths pass all checks of `check_samples`. Every batch does this: NumPy is faster than
    PyTorch on a few numbers."""
    if not len(lengths):
        return True
    if int(lengths.min()) < 0 or int(num_targets.min()) < 0:
        return False
    fits = int(lengths.max()) <= _MAX_INDEX // len(lengths)
    return fits and int((lengths - num_targets).min()) >= num_contextual


def first_true(bad: Tensor) -> int | None:
    """Return the index of the first True of a host tensor, or None."""
    return int(bad.int().argmax()) if bool(bad.any()) else None
