"""The stack against its formula."""

import torch
from torch import nn

from recsys.modules.mlp import MLP


def silu(x):
    return x / (1 + torch.exp(-x))


def linear(layer: nn.Linear, x):
    return torch.einsum("oi,ni->no", layer.weight, x) + layer.bias


def test_two_hidden_layers_are_the_formula():
    mlp = MLP(3, [5, 4], 2).double()
    first, second, last = (layer for layer in mlp if isinstance(layer, nn.Linear))
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), linear(last, silu(linear(second, silu(linear(first, x))))))


def test_layer_norm_stands_before_the_activation():
    mlp = MLP(3, [5], 2, layer_norm=True).double()
    first, last = (layer for layer in mlp if isinstance(layer, nn.Linear))
    x = torch.randn(7, 3, dtype=torch.float64)
    hidden = linear(first, x)
    centred = hidden - hidden.mean(1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(mlp(x), linear(last, silu(normed)))


def test_nothing_hidden_is_one_linear_layer():
    mlp = MLP(3, [], 2, layer_norm=True, dropout=0.5)
    x = torch.randn(4, 3)
    torch.testing.assert_close(mlp(x), linear(mlp[0], x))


def test_dropout_is_for_training_only_and_behind_activations():
    mlp = MLP(4, [4096], 1, dropout=0.75)
    nn.init.zeros_(mlp[0].weight)
    nn.init.ones_(mlp[0].bias)
    nn.init.constant_(mlp[-1].weight, 1 / 4096)
    nn.init.zeros_(mlp[-1].bias)
    expected = silu(torch.ones(())).item()
    assert abs(mlp.eval()(torch.zeros(1, 4)).item() - expected) < 1e-5
    torch.manual_seed(0)
    value = mlp.train()(torch.zeros(1, 4)).item()
    # The mean of 4096 values that are 0 or 4 x silu(1): standard deviation silu(1) * sqrt(3 / 4096) = 0.02.
    assert value != expected and abs(value - expected) < 0.1


def test_gradients():
    mlp = MLP(3, [4], 2, layer_norm=True).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp, (x,))
