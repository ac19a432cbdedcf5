"""Defines `bucket_embedding`: adds learned vectors of buckets (positions, ages) to tokens, with exact table
gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_number
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "bucket_embedding"]

BUCKET_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class BucketFacts:
    """Everything that a backend may consider when it decides whether it can run."""

    device: str
    dtypes: tuple[torch.dtype, ...]


def bucket_embedding(
    x: Tensor,
    tables: Sequence[Tensor],
    buckets: Sequence[Tensor],
    *,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Computes `out[t] = scale * x[t] + sum over i of tables[i][buckets[i][t]]`.

    The gradient of a table is a segment sum: tokens are sorted by bucket, and the rows of each bucket are
    added in float32, in an order that depends only on the buckets. Several programs share a bucket that has
    many tokens.

    Args:
        x: [T, E] floating point, tokens.
        tables: [K, E] floating point; K may differ between tables.
        buckets: int64 or int32 [T], one for each table, each entry in [0, K). On a GPU an entry outside that
            range adds nothing; on a CPU it is an error.
        scale: factor of x.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, E], in the dtype to which `x` and all tables promote. Differentiable in `x` and `tables`.

    Raises:
        TypeError, ValueError: naming the argument. IndexError: a bucket lies outside its table, on a CPU.
    """
    facts = _facts(x, tables, buckets, scale)
    return OP.select(facts, backend).run(x, list(tables), list(buckets), float(scale))


def _facts(x: Tensor, tables: Sequence[Tensor], buckets: Sequence[Tensor], scale: float) -> BucketFacts:
    """Validates the arguments for all backends and returns their static facts."""
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must have shape [tokens, width], got {tuple(x.shape)}")
    if not tables or len(tables) != len(buckets):
        raise ValueError(f"tables and buckets must be pairs, got {len(tables)} and {len(buckets)} of them")
    check_number("scale", scale)
    for number, (table, rows) in enumerate(zip(tables, buckets, strict=True)):
        if not table.is_floating_point():
            raise TypeError(f"tables[{number}] must be floating point, got {table.dtype}")
        if table.dim() != 2 or table.shape[1] != x.shape[1]:
            raise ValueError(
                f"tables[{number}] must have shape [buckets, {x.shape[1]}], got {tuple(table.shape)}"
            )
        if rows.dtype not in BUCKET_DTYPES:
            raise TypeError(f"buckets[{number}] must be int64 or int32, got {rows.dtype}")
        # A traced graph assumes that unknown sizes agree.
        if rows.dim() != 1 or not torch.compiler.is_compiling() and rows.shape[0] != x.shape[0]:
            raise ValueError(
                f"buckets[{number}] must have shape [{x.shape[0]}], as many as tokens, "
                f"got {tuple(rows.shape)}"
            )
        for name, tensor in (("tables", table), ("buckets", rows)):
            if tensor.device != x.device:
                raise ValueError(f"{name}[{number}] is on {tensor.device}, x on {x.device}")
    return BucketFacts(x.device.type, (x.dtype, *(table.dtype for table in tables)))


def supports_triton(facts: BucketFacts) -> Support:
    """Supports what `triton_support.support` does, for the dtypes of all tensors."""
    answers = [triton_support.support(facts.device, dtype) for dtype in facts.dtypes]
    return next((answer for answer in answers if not answer.ok), answers[0])


OP = Op("bucket_embedding", __name__, backends=("triton", "reference"))
