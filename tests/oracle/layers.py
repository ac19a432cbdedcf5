"""Single vectors through the layers that the brute-force ranker is made of; nothing here knows a batch.

Left open by the specification and taken from the layers that own the weights: eps of every LayerNorm without
one of its own is 1e-6, as the specification says for STU layers; a generated layer's weights and its shift
stand side by side, a row an output.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recsys import protos as pb

EPS = 1e-6


class Weights:
    """Tensors of a state dict, seen from one of its modules."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def at(self, *names: object) -> "Weights":
        """The tensors of a submodule."""
        return Weights(self.tensors, self.prefix + "".join(f"{name}." for name in names))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def children(self) -> list[int]:
        """Numbers of the submodules, in order."""
        inside = (name.removeprefix(self.prefix) for name in self.tensors if name.startswith(self.prefix))
        return sorted({int(name.split(".")[0]) for name in inside})


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def linear(weights: Weights, x: Tensor) -> Tensor:
    """W x, + b where there is one."""
    y = weights["weight"] @ x
    return y + weights["bias"] if "bias" in weights else y


def normalise(x: Tensor, eps: float = EPS) -> Tensor:
    centred = x - x.sum() / len(x)
    return centred / torch.sqrt((centred * centred).sum() / len(x) + eps)


def layer_norm(weights: Weights, x: Tensor, eps: float = EPS) -> Tensor:
    return normalise(x, eps) * weights["weight"] + weights["bias"]


def group_norm(weights: Weights, x: Tensor, num_heads: int) -> Tensor:
    """Each head by itself, then scale and shift over all of them."""
    heads = x.reshape(num_heads, -1)
    normed = torch.cat([normalise(head) for head in heads])
    return normed * weights["weight"] + weights["bias"]


def mlp(weights: Weights, x: Tensor) -> Tensor:
    """Linear layers with (layer norm and) SiLU between them; without dropout, as in evaluation."""
    behind_a_linear = False
    for number in weights.children():
        layer = weights.at(number)
        if layer["weight"].dim() == 1:
            x = layer_norm(layer, x)
            continue
        x = linear(layer, silu(x) if behind_a_linear else x)
        behind_a_linear = True
    return x


def contextualized(config: pb.ContextualizedMlp, weights: Weights, x: Tensor, context: Tensor) -> Tensor:
    """y = W_b z + a_b with [W_b, a_b] = G silu(LayerNorm(A c_b))."""
    shared = weights.at("shared")
    for place, number in enumerate(shared.children()):
        x = linear(shared.at(number), x)
        x = silu(x) if place < len(config.hidden) else x
    compress = weights.at("compress")
    hidden = silu(layer_norm(compress.at(1), linear(compress.at(0), context)))
    generated = linear(weights.at("generate"), hidden).reshape(-1, len(x) + 1)
    return generated[:, :-1] @ x + generated[:, -1]


def concatenate(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if (parts := list(parts)) else torch.zeros(0, dtype=torch.float64)


def number(value: float) -> Tensor:
    """[1]: what a reader hands over is float32."""
    return torch.tensor([value], dtype=torch.float32).double()


def given(message: Any, field: str, otherwise: Any) -> Any:
    """A field of a config as its user wrote it, or what its comment says for an absent one."""
    return getattr(message, field) if message.HasField(field) else otherwise
