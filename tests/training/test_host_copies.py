"""Copies in host memory keep the values that tensors had, on a CPU and on a GPU."""

import pytest
import torch

from recsys.training import host_copies
from recsys.training.host_copies import HostCopies


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("large", [2**60, 1], ids=["allocated", "registered"])
def test_copies_keep_their_values_and_their_memory(device, prepared, large, monkeypatch):
    """Work that is queued on the GPU before the copy belongs to it, and work behind the copy does not."""
    monkeypatch.setattr(host_copies, "_LARGE", large)
    tensors = {
        "a": torch.zeros(2000, 2000, device=device),
        "step": torch.tensor(1.0),
        "none": torch.empty(0, 4),
    }
    copies = HostCopies()
    if prepared:
        copies.prepare(dict(tensors))
        allocated = copies._allocating.result()["a"].data_ptr()
    for value in (1, 2):
        for _ in range(50):
            tensors["a"] += value
        taken = copies.take(dict(tensors))
        expected = 50 * sum(range(1, value + 1))
        tensors["a"].mul_(-1).mul_(-1).add_(7)
        assert torch.equal(taken["a"], torch.full((2000, 2000), float(expected)))
        tensors["a"] -= 7
        assert taken["a"].device.type == "cpu" and taken["a"].is_pinned() == (device == "cuda")
        memory = taken["a"].data_ptr()
        assert not prepared or memory == allocated
    assert copies.take(dict(tensors))["a"].data_ptr() == memory
    smaller = copies.take({"a": tensors["a"][:3]})
    assert list(smaller) == ["a"] and torch.equal(smaller["a"], tensors["a"][:3].cpu())
