"""The Triton kernels of `hstu_attention` on a CPU, against the loops: numbers, not code generation.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own: the last
one here starts it, in the process that everything else runs in, and skips where Triton is not installed.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention, last_backend
from tests.ops import oracle
from tests.ops.cases import MASKS, layout_of, qkv, relative_bias, samples

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that the last test starts")

SHAPES = [(9, 5), (0, 3), (0, 0), (23, 0), (2, 9)]
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}  # float32 scores against float64 ones


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    """Several tiles a sample, several blocks a tile, of different sizes in either direction."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from recsys.ops.hstu_attention import triton_launch

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # NumPy >= 2.4 refuses int() of an array of one element
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    rows, keys = getattr(request, "param", (16, 8))
    blocks = triton_launch.Blocks(rows, keys, 4, 1)
    monkeypatch.setattr(triton_launch, "blocks_of", lambda *_: blocks)


def check(batch, mask, *, dim=3, v_dim=2, heads=2, bias_rows=0, deterministic=True, alpha=None, seed=0):
    """Output and all gradients, for random cotangents, against float64 loops."""
    layout = layout_of(batch)
    exact = qkv(layout.total_len, heads=heads, dim=dim, v_dim=v_dim, seed=seed)
    inputs = [tensor.detach().float().requires_grad_() for tensor in exact]
    leaves, wanted, bias, exact_bias = list(inputs), list(exact), None, None
    if bias_rows != 0:
        exact_bias = relative_bias(layout.total_len, rows=bias_rows, seed=seed)
        tables = [exact_bias.position_table, exact_bias.time_table]
        wanted += tables
        leaves += [table.detach().float().requires_grad_() for table in tables]
        bias = RelativeBias(*leaves[3:], exact_bias.timestamps, exact_bias.next_timestamps)
    out = hstu_attention(
        *inputs, layout, mask, alpha=alpha, scale_len=7, bias=bias, backend="triton", deterministic=deterministic
    )
    assert last_backend("hstu_attention") == "triton"
    scale = dim**-0.5 if alpha is None else alpha
    expected = oracle.hstu(*exact, batch, mask, scale, 7, exact_bias)
    torch.testing.assert_close(out.double(), expected, **FLOAT32)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(out, leaves, cotangent.float())
    want = torch.autograd.grad(expected, wanted, cotangent)
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-5 * max(1.0, other.norm())
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4)


@interpreted
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("contextual", [0, 3])
@pytest.mark.parametrize("mask", MASKS[::5], ids=str)
def test_output_and_gradients_equal_the_loops(mask, contextual, deterministic):
    check(samples(contextual, SHAPES), mask, deterministic=deterministic)


@interpreted
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("mask", MASKS[::7], ids=str)
def test_bias_and_its_gradients_equal_the_loops(mask, rows):
    check(samples(1, SHAPES), mask, bias_rows=rows)
