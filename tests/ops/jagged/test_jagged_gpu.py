"""The Triton kernels of `gather_rows` on a GPU: the bits of the reference, sizes in any order, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import gather_rows, last_backend

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def problem(sizes, lengths, width, dtype, seed=0):
    """Sources with these numbers of rows, and maps of these lengths: no row twice, some places empty."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    values = [torch.randn(size, *width, generator=generator).mul(100).to(dtype).to(DEVICE) for size in sizes]
    index = []
    for length in lengths:
        rows = torch.randperm(total, generator=generator)[:length]
        rows = torch.cat([rows, rows.new_full((length - len(rows),), -1)])
        rows[torch.rand(length, generator=generator) < 0.1] = -1
        index.append(rows[torch.randperm(length, generator=generator)].to(DEVICE))
    return values, index


def results(values, index, backend, inverse=None):
    """The output, and gradients of all sources for random cotangents."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in values]
    out = gather_rows(leaves, index, inverse, backend=backend)
    assert last_backend("gather_rows") == backend
    if not out.is_floating_point():
        return [out]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_equal(values, index):
    for got, want in zip(*(results(values, index, one) for one in ("triton", "reference")), strict=True):
        assert torch.equal(got, want)


# Few artefacts: one for each width and size of a number, times the number of sources.
WIDTHS = [((256,), torch.float32), ((4, 25), torch.bfloat16), ((), torch.int64)]


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_maps(data):
    width, dtype = data.draw(st.sampled_from(WIDTHS))
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=3))
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=2))
    assert_equal(*problem(sizes, lengths, width, dtype, data.draw(st.integers(0, 9))))


def test_views_odd_addresses_and_transposed_gradients():
    joint = torch.randn(501, 3 * 256 + 1, device=DEVICE).bfloat16().requires_grad_()
    index = torch.randperm(500, device=DEVICE)
    found = []
    for backend in ("triton", "reference"):
        _, a, b = joint[1:].split([1, 256, 512], dim=1)
        out = gather_rows([a, b[:, :256]], torch.cat([index, index + 500]), backend=backend)
        cotangent = torch.randn(256, 1000, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
        found.append([out.detach(), *torch.autograd.grad(out, joint, cotangent.t())])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_rows_past_two_to_the_thirty_one_numbers():
    values = torch.empty(2**23 + 3, 512, dtype=torch.int8, device=DEVICE)
    values[-1], values[0] = 7, 5
    out = gather_rows(values, torch.tensor([2**23 + 2, -1, 0], device=DEVICE), backend="triton")
    assert out[:, ::511].tolist() == [[7, 7], [0, 0], [5, 5]]


def test_the_same_bits_each_time_for_all_sizes_and_one_artefact():
    from recsys.ops.jagged.triton_ops import gather_kernel, sum_kernel

    batches = [
        problem([rows, 3, rows], [rows] * 2, (256,), torch.float32) for rows in (1, 16, 512, 2048, 4097)
    ]
    expected = [results(*batch, "triton") for batch in batches]
    kernels = (gather_kernel, sum_kernel)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    rapid = [(i, results(*batches[i], "triton")) for n in range(40) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, got in rapid:
        assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    assert after == before


def test_nothing_waits_for_the_device():
    values, index = problem([300, 200], [400, 500], (256,), torch.float32)
    results(values, index, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = [one.requires_grad_() for one in values]
        gather_rows(leaves, index, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_graph_serves_all_sizes():
    def moved(first, second, index, other):
        return 2 * gather_rows([first * 3, second], [index, other], backend="triton")

    compiled = torch.compile(moved, dynamic=True, fullgraph=True)
    for rows in (50, 9, 3000):
        values, index = problem([rows, rows + 4], [rows + 2, rows + 3], (256,), torch.float32)
        leaves = [one.requires_grad_() for one in values]
        got, want = compiled(*leaves, *index), moved(*leaves, *index)
        assert torch.equal(got, want)
        cotangent = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(out, leaves, cotangent) for out in (got, want)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)


def test_the_library_op():
    from recsys.ops.jagged.triton_ops import gather_rows_triton

    values, index = problem([30, 20], [40], (256,), torch.float32)
    leaves = [one.requires_grad_() for one in values]
    torch.library.opcheck(gather_rows_triton, (leaves, index[0], None, [40]))
