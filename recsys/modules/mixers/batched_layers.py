"""Runs a layer of several stacks as one batch, with separate weights but one attention for all."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recsys.modules.precision import product_dtype
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu_paths import KeysValues, Projected


class Layer(Protocol):
    """A layer in two halves around attention, such as `STULayer`."""

    def project(self, x: Tensor) -> Projected:
        """Computes the inputs of attention and gate."""
        ...

    def keys_and_values(self, x: Tensor) -> KeysValues:
        """Computes only keys and values."""
        ...

    def finish(self, x: Tensor, u: Tensor, attended: Tensor, scale: Tensor | None = None) -> Tensor:
        """Computes the layer's output from its input, the gate and attention's output."""
        ...


class Projections(NamedTuple):
    """The inputs of attention and gates, computed by the same layer of each stack.

    Attributes:
        u: for each stack, a tensor [T, H * V].
        q, k: [T of all stacks, H, D].
        v: [T of all stacks, H, V].
    """

    u: list[Tensor]
    q: Tensor
    k: Tensor
    v: Tensor


def to_compute_dtype(sequence: JaggedSequence) -> JaggedSequence:
    """Casts tokens to the dtype of matrix products, so that residual sums are not wider than that."""
    return sequence.with_values(sequence.values.to(product_dtype(sequence.values)))


def parts_of(sequence: JaggedSequence) -> list[JaggedSequence]:
    """Splits a joined sequence into the sequences of its stacks; the sequence of one stack stays whole."""
    return sequence.split() if sequence.layout.parts else [sequence]


def project(layers: Sequence[Layer], parts: Sequence[JaggedSequence]) -> Projections:
    """Runs the first half of each layer on the part of its stack."""
    projected = [layer.project(part.values) for layer, part in zip(layers, parts, strict=True)]
    q, k, v = (_join([getattr(half, name) for half in projected]) for name in "qkv")
    return Projections([half.u for half in projected], q, k, v)


def keys_and_values(layers: Sequence[Layer], parts: Sequence[JaggedSequence]) -> KeysValues:
    """Computes only the keys [T of all stacks, H, D] and values [T of all stacks, H, V] of `project`."""
    pairs = [layer.keys_and_values(part.values) for layer, part in zip(layers, parts, strict=True)]
    return KeysValues(_join([pair.k for pair in pairs]), _join([pair.v for pair in pairs]))


def finish(
    layers: Sequence[Layer],
    parts: Sequence[JaggedSequence],
    projections: Projections,
    attended: Tensor,
    scales: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Runs the second half of each layer and returns [T of all stacks, E].

    Args:
        attended: [T of all stacks, H, V].
        scales: for each layer, the `scale` of `STULayer.forward`.
    """
    attended_parts = attended.split([part.layout.total_len for part in parts])
    scales = [None] * len(parts) if scales is None else scales
    columns = zip(layers, parts, projections.u, attended_parts, scales, strict=True)
    return _join([layer.finish(part.values, u, a, scale) for layer, part, u, a, scale in columns])


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
