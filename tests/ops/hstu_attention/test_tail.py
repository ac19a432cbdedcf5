"""Attention of which only the newest history is read: equal there, with all gradients of keys and values."""

import itertools

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, explain, gather_rows
from recsys.ops.hstu_attention import Problem, attend
from recsys.ops.hstu_attention.reference import run
from tests.ops.cases import MASKS, layout_of, samples

SHAPES = [(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20), (300, 5)]
LONG_MASKS = (AttentionMask(window=40, prefix=9), AttentionMask(130, 70, True, 5))


def case(layout: SequenceLayout, tail: int, dim: int, heads: int, seed: int = 0):
    """q, k, v and a cotangent; q and cotangent are zeros where nobody reads. And which rows are read."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.total_len, heads, dim)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
    index = layout.truncate(tail).index
    read = torch.zeros(layout.total_len, 1, 1, dtype=torch.bool).index_fill_(0, index, True)
    return [tensors[0] * read, tensors[1], tensors[2], tensors[3] * read], index


def exact(layout, mask, tensors, dtype):
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors[:3]]
    out = run(*leaves, Problem(layout, mask, leaves[0].shape[2] ** -0.5, 50.0))
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(dtype))]


def assert_near(got, layout, mask, tensors, index):
    want, theirs = (exact(layout, mask, tensors, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, ours, right, other in zip("oqkv", got, want, theirs, strict=True):
        if name in "oq":
            ours, right, other = (tensor.index_select(0, index) for tensor in (ours, right, other))
        norm = right.norm().clamp(min=1e-30)
        error, allowed = ((tensor.double() - right).norm() / norm for tensor in (ours, other))
        assert ours.isfinite().all() and error <= 2 * allowed + 1e-3, (name, float(error), float(allowed))


@pytest.fixture
def sm90(monkeypatch):
    """The launches, their kernels in the emulator; memory that nobody writes is NaN."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
    from recsys.ops.hstu_attention.hopper import launch, two_pass
    from recsys.ops.runtime import hopper_launch
    from tests.tools.gluon_emulator import Emulated

    for module, names in (
        (launch, ("forward_kernel", "backward_kernel")),
        (two_pass, ("keys_kernel", "wide_keys_kernel", "rows_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    monkeypatch.setattr(hopper_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(
        Problem, "gradient_memory", lambda _, *given: [torch.full_like(one, torch.nan) for one in given]
    )

    def results(layout, mask, tensors, tail):
        problem = Problem(layout, mask, tensors[0].shape[2] ** -0.5, 50.0, tail=tail)
        *given, cotangent = tensors
        out = launch.forward(*given, problem)
        found = [[out, *two_pass.backward(cotangent, *given, problem)[:3]]]
        if tensors[0].shape[2] in launch.BACKWARD_SIZES:
            found.append([out, *launch.backward(cotangent, *given, problem)[:3]])
        return found

    return results


CONTEXTUAL = (0, 3, 70)
CASES = [(mask, CONTEXTUAL[i % 3]) for i, mask in enumerate(MASKS[::7])]
CASES += itertools.product(LONG_MASKS, CONTEXTUAL)


@pytest.mark.parametrize(("mask", "contextual"), CASES, ids=str)
def test_hopper_kernels_in_the_emulator(sm90, mask, contextual):
    """Masks longer than a block meet each number of contextual tokens, the others one number each."""
    layout = layout_of(samples(contextual, SHAPES))
    for tail in (1, 70):
        tensors, index = case(layout, tail, 64, 1)
        for got in sm90(layout, mask, tensors, tail):
            assert_near(got, layout, mask, tensors, index)


def test_wide_heads_in_the_emulator(sm90):
    layout, mask = layout_of(samples(3, [(300, 5), (20, 0)])), AttentionMask(window=40, prefix=9)
    tensors, index = case(layout, 70, 256, 1)
    for got in sm90(layout, mask, tensors, 70):
        assert_near(got, layout, mask, tensors, index)


def test_an_impossible_tail():
    layout = SequenceLayout(torch.tensor([3]))
    q = torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match="tail must be >= 0, got -1"):
        attend(q, q, q, Problem(layout, AttentionMask(), 1.0, 3.0, tail=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", ["sm90", "triton"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=256, prefix=64)], ids=str)
def test_backends_on_a_gpu(mask, dim, backend, deterministic):
    shapes = [(1500, 33), (0, 2), (4000, 0), (1, 140), (2047, 32), (2600, 7)]
    layout, tail = layout_of(samples(2, shapes)), 500
    tensors, index = case(layout, tail, dim, 2)
    q, k, v, cotangent = (tensor.cuda() for tensor in tensors)
    given, on_gpu = [q, k, v], layout.to("cuda")
    support = dict(explain("hstu_attention", *given, on_gpu, scale_len=1).rows)[backend]
    if not support.ok:
        pytest.skip(support.reason)
    leaves = [tensor.requires_grad_() for tensor in given]
    # Rows are read as a layer reads them: what lies elsewhere may be anything.
    problem = Problem(on_gpu, mask, dim**-0.5, 50.0, deterministic=deterministic, tail=tail)
    out = attend(*leaves, problem, backend)
    own = index.cuda()
    read = gather_rows(out, own)
    got = torch.autograd.grad(read, leaves, gather_rows(cotangent, own))
    everything = out.new_zeros(out.shape).index_copy(0, own, read)
    assert_near([tensor.cpu() for tensor in (everything, *got)], layout, mask, tensors, index)
