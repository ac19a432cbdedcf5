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
    num_maps: int
    exported: bool = False


def gather_rows(
    values: Tensor | Sequence[Tensor],
    index: Tensor | Sequence[Tensor],
    inverse: Tensor | None = None,
    *,
    complete: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes `out[n] = values[index[n]]`, with a row of zeros where `index[n] == -1`.

    The result is differentiable in `values`. Several `values` are read as if concatenated, and the outputs of
    several maps `index` follow one another, without copies that concatenate them. A map must not name a row
    twice, so its gradient is a gather, too, exact and in a fixed order: `grad_values[t] = grad_out[n]` for
    the `n` with `index[n] == t`, zero where there is none. With several maps the gradient is the sum over the
    maps in their order, in float32 (float64 for float64).

    Args:
        values: [T, ...], any dtype; or several that differ only in T. T below is their total.
        index: int64 or int32 [N], each in [-1, T); or several.
        inverse: int64 or int32 [T], or [K, T] for K maps: the index in `out` of each row of `values`, -1
            if it does not occur; saves computing it in backward.
        complete: whether no entry of `index` is -1. An exported graph then needs no copy of `values` with a
            row of zeros behind it.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [N, ...] with N the total over all maps, in the dtype of `values`.

    Raises:
        TypeError, ValueError: naming the argument. On a CPU, a row that a map names twice raises in backward.
    """
    sources, maps = _as_tuple(values), _as_tuple(index)
    return OP.select(_checked(sources, maps, inverse), backend).run(sources, maps, inverse, complete=complete)


def _as_tuple(values: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def _checked(sources: tuple[Tensor, ...], maps: tuple[Tensor, ...], inverse: Tensor | None) -> GatherFacts:
    """Validate the arguments for all backends and return the facts of the call."""
    if not sources or not maps:
        name = "index" if sources else "values"
        raise ValueError(f"{name} must be a tensor or some of them, got none")
    first = sources[0]
    dtype, device = first.dtype, first.device
    for number, tensor in enumerate(sources):
        if tensor.dim() == 0:
            raise ValueError(f"{_name('values', number, sources)} must have at least one dimension")
        if number and (tensor.shape[1:] != first.shape[1:] or tensor.dtype != dtype):
            raise ValueError(
                f"values may differ in their first size only, values[{number}] has shape "
                f"{tuple(tensor.shape)} of {tensor.dtype}, the first one {tuple(first.shape)} of {dtype}"
            )
        if tensor.device != device:
            raise ValueError(f"values[{number}] is on {tensor.device}, the first one on {device}")
    for number, tensor in enumerate(maps):
        if tensor.dtype not in INDEX_DTYPES or tensor.dim() != 1 or tensor.device != device:
            _refuse_index(_name("index", number, maps), tensor, first, "one dimension")
    if inverse is not None:
        _check_inverse(inverse, first, len(maps), sum([tensor.shape[0] for tensor in sources]))
    if torch.compiler.is_compiling():
        return GatherFacts(device.type, dtype, len(maps), exported=is_exporting())
    return _known_facts(device.type, dtype, len(maps))


@lru_cache(maxsize=1024)
def _known_facts(device: str, dtype: torch.dtype, num_maps: int) -> GatherFacts:
    """Return the facts from a cache of earlier calls: there are few, and a look-up is cheaper than a new
    object."""
    return GatherFacts(device, dtype, num_maps)


def _name(name: str, number: int, tensors: tuple[Tensor, ...]) -> str:
    """Return the name that a message uses for one of several tensors."""
    return name if len(tensors) == 1 else f"{name}[{number}]"


def _refuse_index(name: str, tensor: Tensor, values: Tensor, dimensions: str) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be int64 or int32, got {tensor.dtype}")
    if tensor.device != values.device:
        raise ValueError(f"{name} is on {tensor.device}, values on {values.device}")
    raise ValueError(f"{name} must have {dimensions}, got shape {tuple(tensor.shape)}")


def _check_inverse(inverse: Tensor, values: Tensor, num_maps: int, num_rows: int) -> None:
    several = inverse.dim() == 2 or num_maps > 1
    if inverse.dtype not in INDEX_DTYPES or inverse.dim() != 1 + several or inverse.device != values.device:
        _refuse_index("inverse", inverse, values, "two dimensions" if several else "one dimension")
    wanted = (num_maps, num_rows) if several else (num_rows,)
    # A traced graph takes unknown sizes to be equal.
    if not torch.compiler.is_compiling() and tuple(inverse.shape) != wanted:
        raise ValueError(
            f"inverse must have shape {list(wanted)}, a place for each row of values, "
            f"got {tuple(inverse.shape)}"
        )


MAX_ITEMSIZE = 8
"""Largest integer, in bytes, as which rows are moved."""


def supports_triton(facts: GatherFacts) -> Support:
    """Support any dtype, since bits are moved; with several maps gradients are added in float32.

    Exported graphs must name this backend: packages with these kernels have not yet passed a multithreading
    test.
    """
    added = facts.num_maps > 1 and facts.dtype.is_floating_point
    able = triton_support.support(facts.device, facts.dtype if added else torch.float32)
    if facts.exported:
        able = able._replace(auto=False)
    if able.ok and facts.dtype.itemsize > MAX_ITEMSIZE:
        reason = f"a number of {facts.dtype} has {facts.dtype.itemsize} bytes, it takes up to {MAX_ITEMSIZE}"
        return able._replace(ok=False, reason=reason)
    return able


OP = Op("gather_rows", __name__, backends=("triton", "reference"))
