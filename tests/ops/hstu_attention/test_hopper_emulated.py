"""The Hopper kernel's logic on a CPU: masks, barriers, buffers, by `tests/tools/gluon_emulator.py`."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention import reference
from recsys.ops.hstu_attention.hopper import backward, launch
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.jagged.mask import visible_pairs
from recsys.ops.runtime import hopper_launch
from tests.ops.cases import MASKS, layout_of, samples
from tests.tools.gluon_emulator import Block, Emulated, Machine, Number, as_python, stand_ins

DTYPES = (torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    for kernel in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(launch, kernel, Emulated(getattr(launch, kernel)))
    monkeypatch.setattr(hopper_launch, "num_processors", lambda device: 3)


def inputs(total_len, dim=64, heads=2, seed=0):
    """q, k and v as parts of one projection, as the layers have them."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(total_len, 3 * heads * dim, generator=generator).to(torch.bfloat16)
    return [part.view(total_len, heads, dim) for part in whole.split(heads * dim, 1)]


def check(layout, mask, dim=64, heads=2, sizes=None, seed=0, backward_sizes=None):
    """Checks both passes with the default sizes, or the one pass whose sizes are given."""
    q, k, v = inputs(layout.total_len, dim, heads, seed)
    problem = Problem(layout, mask, dim**-0.5, 50.0, None)
    cotangent = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1)).to(q)
    got = {}
    if backward_sizes is None:
        got["o"] = launch.forward(q, k, v, problem, sizes)
    if sizes is None and dim in launch.BACKWARD_SIZES:
        grads = launch.backward(cotangent, q, k, v, problem, backward_sizes)[:3]
        got |= zip("qkv", grads, strict=True)
    want, theirs = (results(layout, mask, *(t.to(dtype) for t in (cotangent, q, k, v))) for dtype in DTYPES)
    for name, exact, other in zip("oqkv", want, theirs, strict=True):
        if name in got:
            norm = exact.norm().clamp(min=1e-30)
            error, allowed = ((t.double() - exact).norm() / norm for t in (got[name], other))
            assert got[name].isfinite().all()
            assert error <= 2 * allowed + 1e-3, (name, float(error), float(allowed))


def results(layout, mask, cotangent, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = reference.run(*leaves, Problem(layout, mask, leaves[0].shape[2] ** -0.5, 50.0))
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.parametrize("shape", [(64, 0), (1, 0), (63, 0), (65, 0), (128, 0), (129, 0), (300, 0)])
def test_one_causal_sample(shape):
    check(layout_of(samples(0, [shape])), AttentionMask())


CONTEXTUAL = (0, 3, 70)
LONG_MASKS = (AttentionMask(window=40, prefix=9), AttentionMask(130, 70, True, 5))


@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, CONTEXTUAL[i % 3]) for i, mask in enumerate(MASKS[::5])]
    + list(itertools.product(LONG_MASKS, CONTEXTUAL)),
)
def test_masks(mask, contextual):
    """Masks longer than a block meet each number of contextual tokens, the others one number each."""
    shapes = [(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20)]
    check(layout_of(samples(contextual, shapes)), mask, heads=1)


TILES = ((2, 1), (2, 2), (3, 1), (3, 2))
BLOCKS = ((128, 2), (64, 2), (64, 3), (32, 4))


@pytest.mark.parametrize("tile", range(4))
@pytest.mark.parametrize("block", range(4))
def test_sizes(block, tile):
    """All pairs of strips, buffers of rows, buffers of keys, and ways of the rows of q and the output."""
    strips, q_tiles = TILES[tile]
    how = ("", "held", "out_in_q")[(block + tile) % 3]
    sizes = launch.ForwardSizes(*BLOCKS[block], strips, how == "held", how == "out_in_q", 160, 24, q_tiles)
    for mask in (AttentionMask(window=100, prefix=10), AttentionMask()):
        check(layout_of(samples(2, [(400, 5), (3, 0), (130, 60)])), mask, sizes=sizes, heads=1)


@pytest.mark.parametrize(
    ("dim", "stages", "v_stages", "held"),
    [(64, 2, 1, 0), (64, 3, 2, 64), (128, 2, 1, 0), (128, 3, 2, 64), (128, 2, 1, 128)],
)
def test_sizes_of_the_backward(dim, stages, v_stages, held):
    sizes = launch.BackwardSizes(64, stages, v_stages, held, 240, 24)
    layout = layout_of(samples(2, [(400, 5), (3, 0), (130, 60)]))
    for mask in (AttentionMask(window=100, prefix=10), AttentionMask()):
        check(layout, mask, dim, heads=1, backward_sizes=sizes)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_widths(dim):
    check(layout_of(samples(1, [(200, 7), (90, 0)])), AttentionMask(), dim)


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(130, 70, True, 5)])
@pytest.mark.parametrize(
    ("dim", "seen", "window", "strips"),
    [(64, 192, None, 2), (64, 193, None, 3), (128, 192, None, 2), (128, 193, None, 3), (256, 999, None, 2)]
    + [(64, 512, 512, 2), (128, 1024, 1024, 2), (128, 1025, 1025, 3)],
)
def test_sizes_by_how_many_keys_a_row_sees(dim, seen, window, strips, mask):
    sizes = launch.sizes_for(dim, seen, window)
    assert sizes.strips == strips
    check(layout_of(samples(2, [(300, 7), (0, 1), (193, 0), (64, 70)])), mask, dim, heads=1, sizes=sizes)


@pytest.mark.parametrize(("dim", "contextual"), [(64, 130), (256, 70)])
def test_contextual_rows_see_those_in_blocks_behind_their_strip(dim, contextual):
    mask = AttentionMask(contextual_reads_history=False)
    check(layout_of(samples(contextual, [(60, 3), (0, 0)])), mask, dim, heads=1)


@pytest.mark.parametrize("contextual", [0, 3, 70])
def test_the_mask_by_keys(contextual):
    """Compares all pairs of samples of many kinds with `visible_pairs`."""
    seen_by_keys = as_python(backward.seen_by_keys, stand_ins(Machine(0)))
    for mask in (*MASKS, *LONG_MASKS):
        rule = [Number(n) for n in (contextual, mask.window or 0, mask.prefix, mask.target_group_size)]
        flags = tuple(launch.rules(mask).values())
        for uih, targets in [(150, 3), (0, 2), (0, 0), (40, 150), (1, 30), (300, 0)]:
            end, length = contextual + uih, contextual + uih + targets
            tile = (Number(0), Number(length), Number(end), Number(0))
            score = Block(torch.zeros(max(length - 5, 0), max(length - 7, 0)))
            got = seen_by_keys(score, Number(5), Number(7), tile, rule, flags).data
            want = visible_pairs(mask, torch.tensor([end]), contextual, length)[0].T[5:, 7:]
            assert torch.equal(got, want), (mask, uih, targets)
