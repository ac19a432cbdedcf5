"""The Triton kernels of `bucket_embedding` on a GPU: numbers, repeatability, hot buckets, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import bucket_embedding, last_backend

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def problem(rows, width, dtype, sizes, hot=0.0, seed=0):
    """Tokens, float32 tables, and buckets; a share of the tokens is in the first bucket of the last table."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(DEVICE, dtype)
    tables = [torch.randn(size, width, generator=generator).to(DEVICE) for size in sizes]
    buckets = [torch.randint(size, (rows,), generator=generator) for size in sizes]
    buckets[-1][: int(hot * rows)] = 0
    return x, tables, [one.to(DEVICE) for one in buckets]


def results(given, backend, to=None, scale=16.0):
    """The output and all gradients, for random cotangents."""
    x, tables, buckets = given
    leaves = [one.detach().to(to or one.dtype).requires_grad_() for one in (x, *tables)]
    out = bucket_embedding(leaves[0], leaves[1:], buckets, scale=scale, backend=backend)
    assert last_backend("bucket_embedding") == backend
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out))]


def assert_near(given, **options):
    """Not further from float64 than twice the reference in the same type."""
    got, theirs = results(given, "triton", **options), results(given, "reference", **options)
    want = results(given, "reference", to=torch.float64, **options)
    for ours, other, exact in zip(got, theirs, want, strict=True):
        assert ours.dtype == other.dtype and torch.isfinite(ours).all()
        allowed = 2 * (other.double() - exact).norm() + 1e-6 * exact.norm()
        assert (ours.double() - exact).norm() <= allowed


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_random_buckets(data):
    width, dtype = data.draw(st.sampled_from([(256, torch.float32), (100, torch.bfloat16)]))
    sizes = data.draw(st.lists(st.sampled_from([1, 65, 254, 255, 5000, 40_000]), min_size=1, max_size=3))
    given = problem(
        data.draw(st.integers(0, 3000)), width, dtype, sizes, data.draw(st.sampled_from([0, 0.9]))
    )
    assert_near(given, scale=data.draw(st.sampled_from([1.0, 16.0])))


def test_a_hot_bucket_and_the_same_bits_each_time():
    given = problem(100_000, 256, torch.float32, [8226, 65], hot=0.8)
    assert_near(given)
    first, *others = (results(given, "triton") for _ in range(5))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_bucket_that_is_none_adds_nothing():
    x, tables, buckets = problem(1000, 256, torch.float32, [65])
    wrong = buckets[0].clone()
    wrong[::2] = torch.tensor([-1, 65, -(2**40), 2**40], device=DEVICE).repeat(125)
    out, grad_x, grad = results((x, tables, [wrong]), "triton")
    assert torch.equal(out[::2], 16 * x[::2])
    mine = results((x[1::2], tables, [buckets[0][1::2]]), "triton")
    assert torch.equal(out[1::2], mine[0])
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = torch.zeros(65, 256, dtype=torch.float64, device=DEVICE)
    want.index_add_(0, buckets[0][1::2], cotangent[1::2].double())
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-5)


def test_nothing_waits_for_the_device_and_one_artefact_for_all_sizes():
    from recsys.ops.bucket_embedding.triton_kernels import embed_kernel
    from recsys.ops.segment_sum.triton_kernels import pieces_kernel, shares_kernel

    kernels = (embed_kernel, pieces_kernel, shares_kernel)
    batches = [problem(rows, 256, torch.float32, [65]) for rows in (1024, 2048, 4097, 20_000)]
    expected = [results(given, "triton") for given in batches]
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    found = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in (3, 0, 2, 1) * 10:
            x, tables, buckets = batches[i]
            leaves = [one.detach().requires_grad_() for one in (x, *tables)]
            out = bucket_embedding(leaves[0], leaves[1:], buckets, scale=16.0, backend="triton")
            out.sum().backward()
            found.append((i, out.detach()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, expected[i][0]) for i, out in found)
    assert [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels] == before


def test_a_compiled_graph_serves_all_sizes():
    def embedded(x, first, second, *buckets):
        return 2 * bucket_embedding(x * 3, [first, second], buckets, scale=16.0, backend="triton")

    compiled = torch.compile(embedded, dynamic=True, fullgraph=True)
    for rows in (50, 9, 3000):
        x, tables, buckets = problem(rows, 256, torch.float32, [300, 65])
        leaves = [one.requires_grad_() for one in (x, *tables)]
        got, want = compiled(*leaves, *buckets), embedded(*leaves, *buckets)
        torch.testing.assert_close(got, want)
        cotangent = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(out, leaves, cotangent) for out in (got, want)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_the_library_op():
    from recsys.ops.bucket_embedding.triton_ops import sum_by_bucket_triton

    values, buckets = torch.randn(300, 256, device=DEVICE), torch.randint(65, (300,), device=DEVICE)
    torch.library.opcheck(sum_by_bucket_triton, (values, buckets, 65))
