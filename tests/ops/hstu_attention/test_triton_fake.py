"""The library ops on tensors without numbers, as a compiler looks into them: nothing is launched or kept."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention import triton as ops
from recsys.ops.hstu_attention import triton as triton_launch
from recsys.ops.hstu_attention import work_list
from recsys.ops.hstu_attention.bias import kernels as bias_kernels
from recsys.ops.hstu_attention.cached import triton as cached_ops

BATCH, TOTAL, CACHED, HEADS, DIM, V_DIM = 3, 50, 90, 2, 16, 24


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Pretend to be on a GPU, as far as that needs no driver."""
    for module in (triton_launch, cached_ops):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    for module, kernels in (
        (
            triton_launch,
            ("forward_kernel", "keys_kernel", "rows_kernel", "diagonals_kernel", "others_kernel"),
        ),
        (cached_ops, ("cached_kernel",)),
        (bias_kernels, ("times_kernel",)),
    ):
        for name in kernels:
            monkeypatch.setattr(module, name, Wrapped())
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel, raising=False)
    monkeypatch.setattr(ops, "wrap_triton", lambda kernel: kernel)
    bias_kernels._sent.cache_clear()
    with FakeTensorMode():
        yield
    assert bias_kernels._sent.cache_info().currsize == 0


class Wrapped:
    """A kernel in a graph: a node."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


def tensors(*widths, rows=TOTAL):
    return [torch.empty(rows, HEADS, width, dtype=torch.bfloat16, device="cuda") for width in widths]


def numbers(*sizes):
    return [torch.empty(size, dtype=torch.int64, device="cuda") for size in sizes]


def tables():
    return [torch.empty(HEADS, size, device="cuda") for size in (7, 40)]


RULE = (5, 2, False, 2, True, 0.5, 8.0)  # window, prefix, target_window, group, reads, alpha, scale_len


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_attention(biased, on_a_gpu):
    q, k, v = tensors(DIM, DIM, V_DIM)
    lengths = numbers(BATCH, BATCH + 1, BATCH)
    bias = [*tables(), *numbers(TOTAL, TOTAL)] if biased else [None] * 4
    out = ops.hstu_attention_triton._init_fn(q, k, v, *lengths, *bias, 1, *RULE, False)
    assert out.shape == v.shape and out.device == v.device
    made = ops.hstu_attention_triton_backward._init_fn(
        torch.empty_like(v), q, k, v, *lengths, *bias, 1, *RULE, False
    )
    given = [q, k, v, *bias[:2]] if biased else [q, k, v]
    assert [gradient.shape for gradient in made] == [tensor.shape for tensor in given]


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_cached_attention(biased, on_a_gpu):
    q, k, v = tensors(DIM, DIM, V_DIM)
    cache = tensors(DIM, V_DIM, rows=CACHED)
    *lengths, cached_lengths, cached_offsets = numbers(BATCH, BATCH + 1, BATCH, BATCH, BATCH + 1)
    *bias, cached_times = [*tables(), *numbers(TOTAL, TOTAL, CACHED)] if biased else [None] * 5
    cache = (*cache, cached_lengths, cached_offsets, cached_times, 1)
    out = cached_ops.hstu_attention_cached_triton._init_fn(q, k, v, *lengths, *bias, 0, *RULE, False, *cache)
    assert out.shape == v.shape and out.device == v.device


def test_a_list_of_lengths_without_numbers_comes_from_no_kernel():
    def has_kernel(lengths):
        layout = SimpleNamespace(device=torch.device("cuda"), lengths=lengths)
        return work_list.builder(layout) is not work_list.reference

    lengths = torch.ones(3, dtype=torch.int64)
    assert has_kernel(lengths) and not has_kernel(FakeTensorMode().from_tensor(lengths))


def test_constants_of_a_graph_are_not_those_that_are_kept(monkeypatch):
    monkeypatch.setattr(bias_kernels, "_sent", lambda *_arguments: "kept")
    monkeypatch.setattr(torch, "tensor", lambda *_arguments, device: "new")
    cuda = torch.device("cuda")
    assert bias_kernels.constant((1, 2), cuda, triton_launch.unwrapped) == "kept"
    assert bias_kernels.constant((1, 2), cuda, lambda kernel: kernel) == "new"
