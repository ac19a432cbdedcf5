"""The Triton kernels of `bucket_embedding` on a CPU: numbers, not code generation."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import bucket_embedding, explain, last_backend
from tests.ops.bucket_embedding.test_bucket_embedding import by_lists
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs, rows in several blocks of columns, buckets in several pieces."""
    if not INTERPRETED:
        return
    from recsys.ops.jagged import triton_ops as rows
    from recsys.ops.segment_sum import triton_ops as segments

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(rows, "BLOCK_BYTES", 256)
    monkeypatch.setattr(rows, "LONGEST_BLOCK", 16)
    small = {"ENTRIES": 32, "LONGEST_BLOCK": 8, "SHORT_PIECE": 8, "PIECES": 4, "SMALLEST_PIECE": 8}
    for name, number in small.items():
        monkeypatch.setattr(segments, name, number)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
@hypothesis.settings(max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    rows=st.sampled_from([0, 1, 9, 70]),
    width=st.sampled_from([1, 6, 16, 24]),
    sizes=st.lists(st.sampled_from([1, 5, 40]), min_size=1, max_size=3),
    half=st.booleans(),
    narrow=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_sums_and_gradients(rows, width, sizes, half, narrow, scale):
    x = between_poison(torch.randn(rows, width).to(torch.float16 if half else torch.float32))
    tables = [between_poison(torch.randn(size, width)) for size in sizes]
    buckets = [torch.randint(size, (rows,), dtype=torch.int32 if narrow else torch.int64) for size in sizes]
    buckets[0][: rows // 2] = 0  # a hot one
    leaves = [one.requires_grad_() for one in (x, *tables)]
    out = bucket_embedding(x, tables, [between_poison(one) for one in buckets], scale=scale, backend="triton")
    assert last_backend("bucket_embedding") == "triton" and out.dtype == torch.float32
    cotangent = torch.randn(out.shape)
    want, gradients = by_lists(
        *(one.detach() for one in leaves), buckets=buckets, scale=scale, cotangent=cotangent
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, leaves, between_poison(cotangent))
    for got, exact, leaf in zip(found, gradients, leaves, strict=True):
        assert got.dtype == leaf.dtype
        torch.testing.assert_close(
            got.double(), exact, rtol=1e-3 if got.dtype == torch.float16 else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("size", [254, 255, 2**15 - 2, 2**15 - 1])
def test_the_order_of_buckets_whatever_type_sorts_them(size):
    triton_ops = pytest.importorskip("recsys.ops.bucket_embedding.triton_ops")
    given = [0, size - 1, 7, -1, size, 2**40, -(2**40), size - 1, 7, 0]
    ids, bounds, order = triton_ops.sorted_by_bucket(torch.tensor(given), size)
    assert ids.dtype.itemsize <= 4
    starts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
    found = {
        n: order[start:end].tolist()
        for n, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    }
    assert found == {0: [0, 9], 7: [2, 8], size - 1: [1, 7]}


@interpreted
def test_a_bucket_that_is_none_adds_nothing_and_gets_nothing():
    table = between_poison(torch.randn(3, 4)).requires_grad_()
    x, buckets = torch.zeros(6, 4), torch.tensor([-1, 3, 1, 2**40, -(2**40), 1])
    out = bucket_embedding(x, [table], [buckets], backend="triton")
    assert torch.equal(out[[2, 5]], table[[1, 1]]) and not out[[0, 1, 3, 4]].any()
    cotangent = torch.randn(6, 4)
    (gradient,) = torch.autograd.grad(out, table, cotangent)
    torch.testing.assert_close(gradient[1], cotangent[2] + cotangent[5])
    assert not gradient[[0, 2]].any()


@interpreted
def test_views_and_a_transposed_gradient():
    joint, table = torch.randn(30, 20, requires_grad=True), torch.randn(5, 20, requires_grad=True)
    buckets, found = torch.randint(5, (30,)), []
    for backend in ("triton", "reference"):
        out = bucket_embedding(joint[:, 4:12], [table[:, ::2][:, :8]], [buckets], scale=3.0, backend=backend)
        cotangent = torch.randn(8, 30, generator=torch.Generator().manual_seed(1)).t()
        found.append([out, *torch.autograd.grad(out, (joint, table), cotangent)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("rows", [0, 40])
def test_the_library_op(rows, monkeypatch):
    from recsys.ops.bucket_embedding import triton_ops

    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    values, buckets = torch.randn(rows, 6), torch.randint(5, (rows,))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton_ops.sum_by_bucket_triton, (values, buckets, 5), test_utils=checks)
    got = triton_ops.sum_by_bucket_triton(values, buckets, 5)
    want = torch.zeros(5, 6).index_add(0, buckets, values)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_float64_is_refused():
    x, tables, buckets = torch.randn(4, 2), [torch.randn(3, 2)], [torch.tensor([0, 2, 1, 1])]
    bucket_embedding(x, tables, buckets)
    assert last_backend("bucket_embedding") == "reference"
    assert dict(explain("bucket_embedding", x, tables, buckets).rows)["triton"].ok
    wide = dict(explain("bucket_embedding", x, [tables[0].double()], buckets).rows)["triton"]
    assert "not torch.float64" in wide.reason


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
