"""Tensors without numbers, as a compiler looks into library ops: nothing of theirs is launched or kept."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention import triton as triton_launch
from recsys.ops.hstu_attention import work_list
from recsys.ops.hstu_attention.bias import kernels as bias_kernels


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
