"""Experts and gates in plain Python floats, one candidate at a time."""

import math

from torch import nn


def linear(layer: nn.Linear, x: list[float]) -> list[float]:
    rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    return [bias + sum(w * v for w, v in zip(row, x, strict=True)) for row, bias in rows]


def silu(x: list[float]) -> list[float]:
    return [v / (1 + math.exp(-v)) for v in x]


def mlp(layers: nn.Sequential, x: list[float]) -> list[float]:
    """Linear layers with SiLU between them."""
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(linears):
        x = linear(layer, silu(x) if number else x)
    return x


def expert(module: nn.Sequential, x: list[float]) -> list[float]:
    return silu(mlp(module[0], x))


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def mixture(weights: list[float], vectors: list[list[float]]) -> list[float]:
    return [sum(w * v[i] for w, v in zip(weights, vectors, strict=True)) for i in range(len(vectors[0]))]
