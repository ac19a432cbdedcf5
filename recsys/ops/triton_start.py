"""Starts Triton kernels that run again and again, with little work on the host where there is a way."""

from __future__ import annotations

import os
from typing import Any

import triton
from torch import Tensor

_SHORT_WAY = triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"

if _SHORT_WAY:
    from recsys.ops.hstu_attention.sm90_start import start


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """`kernel[(programs,)](*pointers, *numbers, **constants)` on the current stream.

    Args:
        numbers: parameters that the kernel is not specialised on, directly behind the pointers.
        constants: all that the code depends on, beside the types of the tensors.
    """
    if not _SHORT_WAY:
        kernel[(programs,)](*pointers, *numbers, **constants)
        return
    key = (tuple(tensor.dtype for tensor in pointers), tuple(constants.items()))
    start(kernel, key, programs, (), pointers, numbers, lambda: constants)
