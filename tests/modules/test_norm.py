"""Norms against their formula, written as a loop over tokens and heads."""

import math

import pytest
import torch
from torch import Tensor

from recsys.modules.norm import HeadNorm, LayerNorm

EPS = 1e-6


def by_hand(values: Tensor) -> list[float]:
    """(x - mean) / sqrt(biased variance + eps) of one vector, in Python's floats."""
    numbers = values.double().tolist()
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / len(numbers)
    return [(x - mean) / math.sqrt(variance + EPS) for x in numbers]


def with_affine(norm):
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def test_layer_norm_is_the_formula():
    norm = with_affine(LayerNorm(6)).double()
    x = torch.randn(5, 6, dtype=torch.float64) * 3 + 1
    expected = torch.tensor([by_hand(token) for token in x], dtype=torch.float64) * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_layer_norm_eps_counts_for_small_inputs():
    x = torch.tensor([[1e-3, -1e-3]])
    # Variance 1e-6 and eps 1e-6: 1e-3 / sqrt(2e-6).
    torch.testing.assert_close(LayerNorm(2)(x), torch.tensor([[0.5**0.5, -(0.5**0.5)]]))


def test_head_norm_is_the_formula_for_each_head():
    norm = with_affine(HeadNorm(3, 4)).double()
    x = torch.randn(5, 12, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1]).repeat_interleave(4)
    rows = [by_hand(token[:4]) + by_hand(token[4:8]) + by_hand(token[8:]) for token in x]
    expected = torch.tensor(rows, dtype=torch.float64) * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_heads_do_not_see_each_other():
    norm = with_affine(HeadNorm(2, 4))
    x = torch.randn(3, 8)
    changed = x.clone()
    changed[:, 4:] *= 100
    assert torch.equal(norm(x)[:, :4], norm(changed)[:, :4])


def test_one_head_is_layer_norm():
    head, layer = with_affine(HeadNorm(1, 8)), LayerNorm(8)
    layer.load_state_dict(head.state_dict())
    x = torch.randn(4, 8)
    torch.testing.assert_close(head(x), layer(x))


@pytest.mark.parametrize("norm", [LayerNorm(8), HeadNorm(2, 4)])
def test_bfloat16_tokens_have_float32_statistics(norm):
    # 1000 +- 4 fits bfloat16's grid, its mean and squares do not.
    x = torch.tensor([[1000.0, 1004.0] * 4], dtype=torch.bfloat16)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.tensor([[-1.0, 1.0] * 4]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("norm", [LayerNorm(4), HeadNorm(2, 2)])
def test_gradients(norm):
    norm = with_affine(norm).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


@pytest.mark.parametrize("norm", [LayerNorm(4), HeadNorm(2, 2)])
def test_no_tokens(norm):
    assert norm(torch.empty(0, 4)).shape == (0, 4)
