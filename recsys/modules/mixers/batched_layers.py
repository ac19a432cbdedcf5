"""A layer of several stacks in step: each stack has weights of its own, and all share one attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.modules.precision import product_dtype
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import Kept, STULayer


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


def project(
    layers: Sequence[STULayer], parts: Sequence[JaggedSequence], place: Tensor | None = None
) -> Halves:
    """The first half of each layer, on its own part.

    Args:
        place: [T of all, width], see `STULayer.project`.
    """
    columns = zip(layers, parts, _cut(place, parts), strict=True)
    found = [layer.project(part.values, own) for layer, part, own in columns]
    q, k, v = (_joined([getattr(half, name) for half in found], place) for name in "qkv")
    return Halves([half.u for half in found], q, k, v)


def keys_and_values(
    layers: Sequence[STULayer], parts: Sequence[JaggedSequence], place: Tensor | None = None
) -> Kept:
    """Of `project` what other tokens look at: [T of all, H, D] and [T of all, H, V]. `place`: see
    `STULayer.keys_and_values`."""
    columns = zip(layers, parts, _cut(place, parts), strict=True)
    found = [layer.keys_and_values(part.values, own) for layer, part, own in columns]
    return Kept(*(_joined([getattr(half, name) for half in found], place) for name in "kv"))


def _cut(place: Tensor | None, parts: Sequence[JaggedSequence]) -> Sequence[Tensor | None]:
    """Of each part its own rows."""
    if place is None:
        return [None] * len(parts)
    return place.split([part.layout.total_len for part in parts])


def _joined(tensors: Sequence[Tensor], place: Tensor | None) -> Tensor:
    """[T of all, H, width] from those of the parts, which lie below one another where they are in a place."""
    if place is None or len(tensors) == 1:
        return _join(tensors)
    first = tensors[0]
    return place.as_strided((place.shape[0], *first.shape[1:]), first.stride(), first.storage_offset())


def finish(
    layers: Sequence[STULayer],
    parts: Sequence[JaggedSequence],
    halves: Halves,
    attended: Tensor,
    scales: Sequence[Tensor | None] | None = None,
    in_place: bool = False,
) -> Tensor:
    """The second half of each layer: [T of all, E].

    Args:
        attended: [T of all, H, V].
        scales: of each layer, see `STULayer.forward`.
        in_place: whether the result may take the place of the tokens, see `STULayer.finish`.
    """
    own = attended.split([part.layout.total_len for part in parts])
    scales = [None] * len(parts) if scales is None else scales
    columns = zip(layers, parts, halves.u, own, scales, strict=True)
    return _join(
        [
            layer.finish(part.values, u, one, scale, in_place=in_place)
            for layer, part, u, one, scale in columns
        ]
    )


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
