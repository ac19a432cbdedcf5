"""Attention of which only the newest history is read, on a GPU: equal there, with all gradients of keys and
values. `test_hopper_emulated.py` has the same without one."""

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, explain, gather_rows
from recsys.ops.hstu_attention import Problem, attend
from tests.ops import harness
from tests.ops.cases import layout_of, samples
from tests.ops.hstu_attention.emulated import inputs, results


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
    index, tensors = layout.truncate(tail).index, inputs(layout.total_len, dim, heads=2)
    unread = torch.ones(layout.total_len, dtype=torch.bool).index_fill_(0, index, False)
    tensors[0][unread] = 0
    *given, cotangent = (tensor.cuda() for tensor in tensors)
    on_gpu, read_rows = layout.to("cuda"), index.cuda()
    support = dict(explain("hstu_attention", *given, on_gpu, scale_len=1).rows)[backend]
    if not support.ok:
        pytest.skip(support.reason)
    leaves = [tensor.requires_grad_() for tensor in given]
    # Rows are read as a layer reads them: what lies elsewhere may be anything.
    problem = Problem(on_gpu, mask, dim**-0.5, 50.0, deterministic=deterministic, tail=tail)
    read = gather_rows(attend(*leaves, problem, backend), read_rows)
    grad_q, *grads = torch.autograd.grad(read, leaves, gather_rows(cotangent, read_rows))
    got = [tensor.cpu() for tensor in (read.detach(), gather_rows(grad_q, read_rows), *grads)]
    tensors[3][unread] = 0
    theirs, exact = (results(layout, mask, tensors, dtype) for dtype in (torch.bfloat16, torch.float64))
    for values in (theirs, exact):
        values[:2] = [tensor[index] for tensor in values[:2]]
    harness.assert_as_near(got, theirs, exact, floor=1e-3)
