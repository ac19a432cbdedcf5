"""The Hopper kernel's logic on a CPU: masks, barriers, buffers, by `tests/ops/gluon_emulator.py`."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention import reference, sm90_launch
from recsys.ops.hstu_attention.triton_launch import Problem
from tests.ops.cases import MASKS, layout_of, samples
from tests.ops.gluon_emulator import Emulated


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(sm90_launch, "forward_kernel", Emulated(sm90_launch.forward_kernel))
    monkeypatch.setattr(sm90_launch, "num_processors", lambda device: 3)


def inputs(total_len, dim=64, heads=2, seed=0):
    """q, k and v as parts of one projection, as the layers have them."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(total_len, 3 * heads * dim, generator=generator).to(torch.bfloat16)
    return [part.view(total_len, heads, dim) for part in whole.split(heads * dim, 1)]


def check(layout, mask, dim=64, heads=2, sizes=None, seed=0):
    q, k, v = inputs(layout.total_len, dim, heads, seed)
    out = sm90_launch.forward(q, k, v, Problem(layout, mask, dim**-0.5, 50.0, None), sizes)
    rest = {"alpha": dim**-0.5, "scale_len": 50.0, "bias": None, "deterministic": False}
    want = reference.run(*(t.double() for t in (q, k, v)), layout, mask, **rest)
    theirs = reference.run(q, k, v, layout, mask, **rest)
    error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
    allowed = 2 * (theirs.double() - want).norm() / want.norm().clamp(min=1e-30) + 1e-3
    assert out.isfinite().all() and error <= allowed, (float(error), float(allowed))


@pytest.mark.parametrize("shape", [(64, 0), (1, 0), (63, 0), (65, 0), (128, 0), (129, 0), (300, 0)])
def test_one_causal_sample(shape):
    check(layout_of(samples(0, [shape])), AttentionMask())


@pytest.mark.parametrize("contextual", [0, 3, 70])
@pytest.mark.parametrize(
    "mask", [*MASKS[::5], AttentionMask(window=40, prefix=9), AttentionMask(130, 70, True, 5)]
)
def test_masks(mask, contextual):
    shapes = [(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20)]
    check(layout_of(samples(contextual, shapes)), mask, heads=1)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("strips", [2, 3])
@pytest.mark.parametrize(("keys", "stages"), [(128, 2), (64, 2), (64, 3), (32, 4)])
def test_sizes(strips, keys, stages, turns):
    sizes = sm90_launch.Sizes(keys, stages, strips, False, 160, 24, turns)
    mask = AttentionMask(window=100, prefix=10)
    check(layout_of(samples(2, [(400, 5), (3, 0), (130, 60)])), mask, sizes=sizes, heads=1)
    check(layout_of(samples(2, [(400, 5), (3, 0), (130, 60)])), AttentionMask(), sizes=sizes, heads=1)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_widths(dim):
    check(layout_of(samples(1, [(200, 7), (90, 0)])), AttentionMask(), dim)
