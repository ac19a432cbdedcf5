"""Moves rows of jagged tensors: concatenates, splits, truncates, interleaves and pads, all by one map of
rows.

`gather_rows` executes every index that `SequenceLayout` provides: one map forward, its inverse backward, no
atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Op, Support, is_exporting

__all__ = ["OP", "gather_rows"]

INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class GatherFacts:
    """Facts of a call from which a backend decides whether it can run."""

    device: str
    dtype: torch.dtype
    exported: bool = False


def gather_rows(
    values: Tensor | Sequence[Tensor],
    index: Tensor,
    inverse: Tensor | None = None,
    *,
    complete: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes `out[n] = values[index[n]]`, with a row of zeros where `index[n] == -1`.

    The result is differentiable in `values`. Several `values` are read as if concatenated, without a copy. No
    row may be named twice, so the gradient is a gather, too, exact and in a fixed order: `grad_values[t] =
    grad_out[n]` for the `n` with `index[n] == t`, zero where there is none.

    Args:
        values: [T, ...], any dtype; or several that differ only in T. T below is their total.
        index: int64 or int32 [N], each in [-1, T).
        inverse: int64 or int32 [T], the index in `out` of each row of `values`, -1 if it does not occur;
            saves computing it in backward.
        complete: whether no entry of `index` is -1. An exported graph then needs no copy of `values` with a
            row of zeros behind it.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [N, ...], in the dtype of `values`.

    Raises:
        TypeError, ValueError: naming the argument. On a CPU, a row that is named twice raises in backward.
    """
    sources = (values,) if isinstance(values, Tensor) else tuple(values)
    return OP.select(_checked(sources, index, inverse), backend).run(
        sources, index, inverse, complete=complete
    )


def _checked(sources: tuple[Tensor, ...], index: Tensor, inverse: Tensor | None) -> GatherFacts:
    """Validate the arguments for all backends and return the facts of the call."""
    if not sources:
        raise ValueError("values must be a tensor or some of them, got none")
    first = sources[0]
    dtype, device = first.dtype, first.device
    for number, tensor in enumerate(sources):
        if tensor.dim() == 0:
            name = "values" if len(sources) == 1 else f"values[{number}]"
            raise ValueError(f"{name} must have at least one dimension")
        if number and (tensor.shape[1:] != first.shape[1:] or tensor.dtype != dtype):
            raise ValueError(
                f"values may differ in their first size only, values[{number}] has shape "
                f"{tuple(tensor.shape)} of {tensor.dtype}, the first one {tuple(first.shape)} of {dtype}"
            )
        if tensor.device != device:
            raise ValueError(f"values[{number}] is on {tensor.device}, the first one on {device}")
    _check_index("index", index, device)
    if inverse is not None:
        _check_index("inverse", inverse, device)
        num_rows = sum([tensor.shape[0] for tensor in sources])
        # A traced graph takes unknown sizes to be equal.
        if not torch.compiler.is_compiling() and inverse.shape[0] != num_rows:
            raise ValueError(
                f"inverse must have shape {[num_rows]}, a place for each row of values, "
                f"got {tuple(inverse.shape)}"
            )
    if torch.compiler.is_compiling():
        return GatherFacts(device.type, dtype, exported=is_exporting())
    return _known_facts(device.type, dtype)


@lru_cache(maxsize=1024)
def _known_facts(device: str, dtype: torch.dtype) -> GatherFacts:
    """Return the facts from a cache of earlier calls: there are few, and a look-up is cheaper than a new
    object."""
    return GatherFacts(device, dtype)


def _check_index(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be int64 or int32, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, values on {device}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")


MAX_ITEMSIZE = 8
"""Largest integer, in bytes, as which rows are moved."""


def supports_triton(facts: GatherFacts) -> Support:
    """Support any dtype, since bits are moved.

    Exported graphs must name this backend: packages with these kernels have not yet passed a multithreading
    test.
    """
    able = triton_support.support(facts.device, torch.float32)
    if facts.exported:
        able = able._replace(auto=False)
    if able.ok and facts.dtype.itemsize > MAX_ITEMSIZE:
        reason = f"a number of {facts.dtype} has {facts.dtype.itemsize} bytes, it takes up to {MAX_ITEMSIZE}"
        return able._replace(ok=False, reason=reason)
    return able


OP = Op("gather_rows", __name__, backends=("triton", "reference"))
