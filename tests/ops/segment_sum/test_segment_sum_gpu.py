"""The Triton kernels of `segment_sum` on a GPU: numbers, repeatability, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import last_backend, segment_sum

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def results(values, lengths, backend, dtype=None):
    """Sums, and the gradient for random cotangents."""
    leaf = values.detach().to(dtype or values.dtype).requires_grad_()
    out = segment_sum(leaf, lengths, backend=backend)
    assert last_backend("segment_sum") == backend
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(values).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaf, cotangent)]


def assert_near(values, lengths):
    """Sums as exact as float32 can be; gradients are copies."""
    got, want = results(values, lengths, "triton"), results(values, lengths, "reference", torch.float64)
    size = segment_sum(values.abs().double(), lengths, backend="reference")
    unit = 2.0**-8 if values.dtype == torch.bfloat16 else 2.0**-22
    assert ((got[0].double() - want[0]).abs() <= unit * want[0].abs() + 1e-6 * size).all()
    assert torch.equal(got[1].double(), want[1])


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_segments(data):
    width, dtype = data.draw(
        st.sampled_from([((256,), torch.float32), ((), torch.float32), ((2, 50), torch.bfloat16)])
    )
    parts = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 63, 64, 65, 1000, 20_000]), max_size=6)
    lengths = torch.tensor(data.draw(parts) * data.draw(st.sampled_from([1, 1, 40])), dtype=torch.int64)
    lengths = lengths[: 1 + int((lengths.cumsum(0) < 50_000).sum())]
    generator = torch.Generator().manual_seed(2)
    assert_near(
        torch.randn(int(lengths.sum()), *width, generator=generator).to(DEVICE, dtype), lengths.to(DEVICE)
    )


@pytest.mark.parametrize("num_segments", [1, 65, 100_000])
def test_one_segment_has_nearly_everything(num_segments):
    lengths = torch.ones(num_segments, dtype=torch.int32, device=DEVICE)
    lengths[num_segments // 2] = 262_144
    values = torch.randn(int(lengths.sum()), 256, device=DEVICE)
    assert_near(values, lengths)
    first, second = (results(values, lengths, "triton") for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_nothing_waits_for_the_device():
    values, lengths = torch.randn(300, 256, device=DEVICE), torch.tensor([100, 0, 200], device=DEVICE)
    results(values, lengths, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        segment_sum(values.requires_grad_(), lengths, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_graph_serves_all_sizes():
    def pooled(values, lengths):
        return 2 * segment_sum(values * 3, lengths, backend="triton")

    compiled = torch.compile(pooled, dynamic=True, fullgraph=True)
    for part in ([3, 0, 7], [1], [900, 40, 0, 2000]):
        lengths = torch.tensor(part, device=DEVICE)
        values = torch.randn(sum(part), 256, device=DEVICE, requires_grad=True)
        got, want = compiled(values, lengths), pooled(values, lengths)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        cotangent = torch.randn_like(want)
        torch.testing.assert_close(*(torch.autograd.grad(out, values, cotangent)[0] for out in (got, want)))


def test_the_library_op():
    from recsys.ops.segment_sum.triton_ops import segment_sum_triton

    values = torch.randn(30, 256, device=DEVICE, requires_grad=True)
    torch.library.opcheck(segment_sum_triton, (values, torch.tensor([10, 0, 20], device=DEVICE)))
