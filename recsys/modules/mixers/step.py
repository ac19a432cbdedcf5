"""A layer of several stacks in step: each stack has weights of its own, and all share one attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import Kept, STULayer, product_dtype


class Halves(NamedTuple):
    """What the layers make of their inputs before tokens see each other."""

    u: list[Tensor]  # of each layer [T, H * V]
    q: Tensor  # [T of all, H, D]
    k: Tensor
    v: Tensor  # [T of all, H, V]


def in_policy(sequence: JaggedSequence) -> JaggedSequence:
    """Tokens in the type of matrix products: what layers add to them is no wider."""
    return sequence.with_values(sequence.values.to(product_dtype(sequence.values)))


def parts_of(sequence: JaggedSequence) -> list[JaggedSequence]:
    """The sequences of the stacks, or the only one."""
    return sequence.split() if sequence.layout.parts else [sequence]


def project(layers: Sequence[STULayer], parts: Sequence[JaggedSequence]) -> Halves:
    """The first half of each layer, on its own part."""
    found = [layer.project(part.values) for layer, part in zip(layers, parts, strict=True)]
    q, k, v = (_join([getattr(half, name) for half in found]) for name in "qkv")
    return Halves([half.u for half in found], q, k, v)


def keys_and_values(layers: Sequence[STULayer], parts: Sequence[JaggedSequence]) -> Kept:
    """Of `project` what other tokens look at: [T of all, H, D] and [T of all, H, V]."""
    found = [layer.keys_and_values(part.values) for layer, part in zip(layers, parts, strict=True)]
    return Kept(_join([half.k for half in found]), _join([half.v for half in found]))


def finish(
    layers: Sequence[STULayer],
    parts: Sequence[JaggedSequence],
    halves: Halves,
    attended: Tensor,
    scales: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The second half of each layer: [T of all, E].

    Args:
        attended: [T of all, H, V].
        scales: of each layer, see `STULayer.forward`.
    """
    own = attended.split([part.layout.total_len for part in parts])
    scales = [None] * len(parts) if scales is None else scales
    columns = zip(layers, parts, halves.u, own, scales, strict=True)
    return _join([layer.finish(part.values, u, one, scale) for layer, part, u, one, scale in columns])


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
