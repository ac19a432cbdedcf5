"""The Triton kernels of `gated_norm` on a GPU: numbers, repeatability, sizes in any order, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import gated_norm, last_backend

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SEED = torch.tensor([2**40 + 12345])


def inputs(rows, width, dtype):
    """a and u as views of one projection, and float32 parameters."""
    generator = torch.Generator().manual_seed(rows)
    joint = torch.randn(rows, 3 * width, generator=generator).to(DEVICE, dtype)
    a, u, _ = joint.split(width, dim=1)
    return [a, u, *(torch.randn(width, generator=generator).to(DEVICE) for _ in range(2))]


def results(given, backend, to=None, **options):
    """The output and all gradients, for random cotangents."""
    leaves = [tensor.detach().to(to or tensor.dtype).requires_grad_() for tensor in given]
    out = gated_norm(*leaves, seed=SEED.to(DEVICE), backend=backend, **options)
    assert last_backend("gated_norm") == backend
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_near(given, **options):
    """Not further from float64 than twice the reference in the same type; the same entries are dropped."""
    got, theirs = results(given, "triton", **options), results(given, "reference", **options)
    assert torch.equal(got[0] == 0, theirs[0] == 0)
    want = results(given, "reference", to=torch.float64, **options)
    for ours, other, exact in zip(got, theirs, want, strict=True):
        assert torch.isfinite(ours).all()
        # The norm of a single number is 0, with a slope of 1 / sqrt(eps) = 1000: rounding shows.
        floor = 1e-3 if given[0].shape[1] == options.get("num_groups", 1) else 1e-5
        allowed = 2 * (other.double() - exact).norm() + floor * (exact.norm() + exact.numel() ** 0.5)
        assert (ours.double() - exact).norm() <= allowed


@hypothesis.settings(max_examples=50)
@hypothesis.given(data=st.data())
def test_random_shapes(data):
    groups = data.draw(st.sampled_from([1, 2, 4]))
    width = groups * data.draw(st.sampled_from([1, 16, 33, 64, 100, 256, 1000, 1024]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    given = inputs(data.draw(st.integers(1, 3000)), width, dtype)
    assert_near(
        given,
        num_groups=groups,
        gate=data.draw(st.sampled_from(["ugn", "concat"])),
        dropout=data.draw(st.sampled_from([0.0, 0.1, 0.5])),
    )


@pytest.mark.parametrize("width", [4096, 2000])
def test_wide_rows(width):
    assert_near(inputs(77, width, torch.bfloat16), dropout=0.2)


def test_the_same_bits_each_time_for_all_sizes_and_one_artefact():
    from recsys.ops.gated_norm.triton_kernels import backward_kernel, forward_kernel

    batches = [inputs(rows, 256, torch.bfloat16) for rows in (1, 7, 512, 2048, 4097)]
    expected = [results(given, "triton", dropout=0.2) for given in batches]
    kernels = (forward_kernel, backward_kernel)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    rapid = [(i, results(batches[i], "triton", dropout=0.2)) for n in range(40) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, got in rapid:
        assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    assert after == before


def test_nothing_waits_for_the_device():
    given = [tensor.requires_grad_() for tensor in map(torch.clone, inputs(500, 128, torch.bfloat16))]
    gated_norm(*given, dropout=0.2, backend="triton").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gated_norm(*given, dropout=0.2, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_graph_serves_all_sizes():
    def gate(a, u, weight, bias, seed):
        return gated_norm(a, u, weight, bias, num_groups=2, dropout=0.2, seed=seed, backend="triton")

    compiled, seed = torch.compile(gate, dynamic=True, fullgraph=True), SEED.to(DEVICE)
    for rows in (50, 9, 3000):
        given = [tensor.requires_grad_() for tensor in map(torch.clone, inputs(rows, 64, torch.bfloat16))]
        got, want = compiled(*given, seed), gate(*given, seed)
        torch.testing.assert_close(got, want)
        cotangent = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(out, given, cotangent) for out in (got, want)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)


def test_the_library_op():
    from recsys.ops.gated_norm.triton_ops import gated_norm_triton

    given = [tensor.requires_grad_() for tensor in map(torch.clone, inputs(40, 64, torch.float32))]
    for seed, dropout in ((None, 0.0), (SEED.to(DEVICE), 0.4)):
        torch.library.opcheck(gated_norm_triton, (*given, seed, 2, 1e-6, True, dropout))
