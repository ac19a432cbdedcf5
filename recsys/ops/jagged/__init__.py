"""Row movement on jagged tensors: concatenate, split, truncate, interleave, pad, all by one map of rows.

`gather_rows` carries out every index that `SequenceLayout` hands out: one map forward, its inverse backward,
no atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops.dispatch import Op

__all__ = ["OP", "gather_rows"]

INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class GatherFacts:
    """All that a backend may know when it says whether it can run."""

    device: str
    dtype: torch.dtype
    num_maps: int


def gather_rows(
    values: Tensor | Sequence[Tensor],
    index: Tensor | Sequence[Tensor],
    inverse: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """`out[n] = values[index[n]]`, or a row of zeros where `index[n] == -1`. Differentiable in `values`.

    Several `values` are read as one after the other, several maps `index` write one after the other, and
    neither is concatenated. A map must not name a row twice; so its gradient is a gather too, exact and in a
    fixed order: `grad_values[t] = grad_out[n]` for the `n` with `index[n] == t`, zero where there is none.
    With several maps it is the sum over them in their order, in float32 (float64 for float64).

    Args:
        values: [T, ...], any dtype; or several that differ in T only. T below is their sum.
        index: int64 or int32 [N], each in [-1, T); or several.
        inverse: int64 or int32 [T], or [K, T] for K maps: where `out` holds each row of `values`, -1 for
            nowhere; saves computing it in backward.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [N, ...], N in all, dtype of `values`.

    Raises:
        TypeError, ValueError: naming the argument. A row that a map names twice raises in backward, on a CPU.
    """
    facts = _facts(values, index, inverse)
    sources = [values] if isinstance(values, Tensor) else list(values)
    maps = [index] if isinstance(index, Tensor) else list(index)
    return OP.select(facts, backend).run(sources, maps, inverse)


def _facts(
    values: Tensor | Sequence[Tensor], index: Tensor | Sequence[Tensor], inverse: Tensor | None = None
) -> GatherFacts:
    """The one validator of all backends, and what is left to know once the arguments are sound."""
    sources, maps = _named("values", values), _named("index", index)
    _, first = sources[0]
    for name, tensor in sources:
        if tensor.dim() == 0:
            raise ValueError(f"{name} must have at least one dimension")
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise ValueError(
                f"values may differ in their first size only, {name} has shape {tuple(tensor.shape)} of "
                f"{tensor.dtype}, the first one {tuple(first.shape)} of {first.dtype}"
            )
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, the first one on {first.device}")
    for name, tensor in maps:
        _check_index(name, tensor, first, dims=1)
    if inverse is not None:
        _check_inverse(inverse, first, len(maps), sum(tensor.shape[0] for _, tensor in sources))
    return GatherFacts(first.device.type, first.dtype, len(maps))


def _named(name: str, given: Tensor | Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """One tensor or several of them, each with what a message calls it."""
    if isinstance(given, Tensor):
        return [(name, given)]
    found = [(f"{name}[{number}]", tensor) for number, tensor in enumerate(given)]
    if not found:
        raise ValueError(f"{name} must be a tensor or some of them, got none")
    for one, tensor in found:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{one} must be a tensor, got {type(tensor).__name__}")
    return found


def _check_index(name: str, tensor: Tensor, values: Tensor, dims: int) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be int64 or int32, got {tensor.dtype}")
    if tensor.dim() != dims:
        words = "one dimension" if dims == 1 else "two dimensions"
        raise ValueError(f"{name} must have {words}, got shape {tuple(tensor.shape)}")
    if tensor.device != values.device:
        raise ValueError(f"{name} is on {tensor.device}, values on {values.device}")


def _check_inverse(inverse: Tensor, values: Tensor, num_maps: int, num_rows: int) -> None:
    several = inverse.dim() == 2 or num_maps > 1
    _check_index("inverse", inverse, values, dims=2 if several else 1)
    wanted = (num_maps, num_rows) if several else (num_rows,)
    # A traced graph takes sizes that it does not know for equal.
    if not torch.compiler.is_compiling() and tuple(inverse.shape) != wanted:
        raise ValueError(
            f"inverse must have shape {list(wanted)}, a place for each row of values, "
            f"got {tuple(inverse.shape)}"
        )


OP = Op("gather_rows", __name__, backends=("triton", "reference"), facts=_facts)
