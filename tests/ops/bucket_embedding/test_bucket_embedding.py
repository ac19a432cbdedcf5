"""`bucket_embedding` against sums over lists, its kernels against float64, and wrong arguments."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import bucket_embedding
from tests.ops import harness
from tests.ops.harness import Problem, Runner, assert_is, assert_near, normal, runners
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, interpreted

ON_GPU = Runner("triton", "cuda")


def embedded(x, buckets, scale, backend, **tables):
    return bucket_embedding(x, list(tables.values()), buckets, scale=scale, backend=backend)


def problem(rows, width, sizes, dtype=torch.float64, *, hot=0.0, scale=16.0, ids=torch.int64) -> Problem:
    """Tokens, tables of float32 at least; a share of the tokens is in the first bucket of the first table."""
    generator = torch.Generator().manual_seed(rows)
    buckets = [torch.randint(size, (rows,), generator=generator, dtype=ids) for size in sizes]
    buckets[0][: int(hot * rows)] = 0
    tables = {f"table_{number}": normal(size, width, seed=number + 1) for number, size in enumerate(sizes)}
    given = Problem("bucket_embedding", embedded, {"x": normal(rows, width), **tables})
    given = given.cast(torch.promote_types(dtype, torch.float32), x=dtype)
    return given.with_options(buckets=buckets, scale=scale)


def by_lists(x, buckets, scale, **tables):
    """The sum, token by token."""
    rows = [scale * row for row in x]
    for table, column in zip(tables.values(), buckets, strict=True):
        rows = [row + table[int(bucket)] for row, bucket in zip(rows, column, strict=True)]
    return torch.stack(rows) if rows else x * 1 + sum(table.sum() for table in tables.values()) * 0


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("sizes", [[5], [1, 7], [3, 2, 4]])
@pytest.mark.parametrize("rows", [0, 1, 20])
def test_output_and_all_gradients(rows, sizes, scale):
    assert_is(problem(rows, 3, sizes, scale=scale), by_lists)


def test_the_output_holds_all_types():
    x, table, buckets = (
        torch.ones(2, 1).bfloat16(),
        torch.full((1, 1), 2.0**-20),
        torch.zeros(2, dtype=torch.int32),
    )
    assert bucket_embedding(x, [table], [buckets]).tolist() == [[1 + 2.0**-20]] * 2
    assert bucket_embedding(x, [table.bfloat16()], [buckets]).dtype == torch.bfloat16


def arguments(**changes):
    return {
        "x": torch.zeros(4, 2),
        "tables": [torch.zeros(3, 2)],
        "buckets": [torch.zeros(4, dtype=torch.int64)],
    } | changes


WRONG = [
    ({"x": torch.zeros(4, 2, dtype=torch.int64)}, TypeError, "x must be floating point, got torch.int64"),
    ({"x": torch.zeros(4)}, ValueError, r"x must have shape \[tokens, width\], got \(4,\)"),
    ({"tables": []}, ValueError, "tables and buckets must be pairs, got 0 and 1 of them"),
    (
        {"tables": [torch.zeros(3, 3)]},
        ValueError,
        r"tables\[0\] must have shape \[buckets, 2\], got \(3, 3\)",
    ),
    (
        {"tables": [torch.zeros(3, 2, dtype=torch.int32)]},
        TypeError,
        r"tables\[0\] must be floating point, got torch.int32",
    ),
    ({"tables": [torch.zeros(3, 2, device="meta")]}, ValueError, r"tables\[0\] is on meta, x on cpu"),
    ({"buckets": [torch.zeros(4)]}, TypeError, r"buckets\[0\] must be int64 or int32, got torch.float32"),
    (
        {"buckets": [torch.zeros(3, dtype=torch.int64)]},
        ValueError,
        r"buckets\[0\] must have shape \[4\], .* got \(3,\)",
    ),
    ({"buckets": [torch.tensor([0, 1, 2, 3])]}, IndexError, "index out of range"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
]


test_wrong_arguments_are_named = harness.refused(bucket_embedding, arguments, WRONG)


# --- the kernels ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs, rows in several blocks of columns, buckets in several pieces, in the interpreter."""
    if INTERPRETED:
        from recsys.ops.bucket_embedding import triton as triton_ops
        from recsys.ops.jagged import triton as rows

        harness.shrink(monkeypatch, rows, BLOCK_BYTES=256, LONGEST_BLOCK=16)
        small = {"ENTRIES": 32, "LONGEST_BLOCK": 8, "SHORT_PIECE": 8, "PIECES": 4, "SMALLEST_PIECE": 8}
        harness.shrink(monkeypatch, triton_ops, SHARE_COLUMNS=4, **small)


@interpreted
@hypothesis.settings(max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    rows=st.sampled_from([0, 1, 9, 70]),
    width=st.sampled_from([1, 6, 16, 24]),
    sizes=st.lists(st.sampled_from([1, 5, 40]), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    ids=st.sampled_from([torch.int32, torch.int64]),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_sums_and_gradients(rows, width, sizes, dtype, ids, scale):
    given = problem(rows, width, sizes, dtype, hot=0.5, scale=scale, ids=ids)
    close = 1e-3 if dtype == torch.float16 else 1e-5
    assert_near(given, Runner("triton", "cpu"), close=close, floor=1e-5)


@pytest.mark.gpu
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_random_buckets(data):
    width, dtype = data.draw(st.sampled_from([(256, torch.float32), (100, torch.bfloat16)]))
    sizes = data.draw(st.lists(st.sampled_from([1, 65, 254, 255, 5000, 40_000]), min_size=1, max_size=3))
    options = {"hot": data.draw(st.sampled_from([0, 0.9])), "scale": data.draw(st.sampled_from([1.0, 16.0]))}
    assert_near(problem(data.draw(st.integers(0, 3000)), width, sizes, dtype, **options), ON_GPU)


def sums_by_list(values, order, lengths):
    """Sums in float64 of the rows of each segment, segment by segment."""
    parts = values.double()[order].split(list(lengths))
    return torch.stack([part.sum(0) for part in parts])


@interpreted
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("piece", [8, 16])
def test_segments_however_rows_are_cut(piece, together, monkeypatch):
    """Starts and ends on, before and behind the ends of pieces."""
    from recsys.ops.bucket_embedding import triton as triton_ops

    monkeypatch.setattr(triton_ops, "cuts_of", lambda *_: triton_ops.Cuts(piece, together))
    for lengths in ([8, 8, 16], [7, 1, 9, 15], [33], [1] * 40, [0, 31, 0, 1, 0], [16, 0, 0, 17], [0, 0]):
        counts = torch.tensor(lengths)
        values, order = torch.randn(sum(lengths), 5), torch.randperm(sum(lengths))
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        ids = torch.arange(len(lengths)).repeat_interleave(counts)
        out = triton_ops.launch_sums(values, triton_ops.Segments(ids, bounds, order), torch.float32)
        harness.assert_close([out], [sums_by_list(values, order, lengths)], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_buckets", [1, 65, 100_000])
def test_one_bucket_has_nearly_all_rows(num_buckets):
    """The same bits each time, and as exact as sums of float32 can be."""
    from recsys.ops.bucket_embedding import triton as triton_ops

    buckets = torch.cat([torch.arange(num_buckets), torch.full((262_144,), num_buckets // 2)]).cuda()
    values = torch.randn(len(buckets), 256, device="cuda")
    sums = [
        triton_ops.launch_sums(values, triton_ops.sorted_by_bucket(buckets, num_buckets), torch.float32)
        for _ in range(2)
    ]
    assert torch.equal(*sums)
    want, size = (
        torch.zeros(num_buckets, 256, dtype=torch.float64, device="cuda").index_add_(0, buckets, terms)
        for terms in (values.double(), values.double().abs())
    )
    assert ((sums[0].double() - want).abs() <= 2.0**-22 * want.abs() + 1e-6 * size).all()


@pytest.mark.parametrize("size", [254, 255, 2**15 - 2, 2**15 - 1])
def test_the_order_of_buckets_whatever_type_sorts_them(size):
    triton_ops = pytest.importorskip("recsys.ops.bucket_embedding.triton")
    given = [0, size - 1, 7, -1, size, 2**40, -(2**40), size - 1, 7, 0]
    ids, bounds, order = triton_ops.sorted_by_bucket(torch.tensor(given), size)
    assert ids.dtype.itemsize <= 4
    starts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
    orders = {
        n: order[start:end].tolist()
        for n, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    }
    assert orders == {0: [0, 9], 7: [2, 8], size - 1: [1, 7]}


@pytest.mark.parametrize("runner", runners("triton"))
def test_a_bucket_outside_of_the_table_adds_nothing_and_gets_nothing(runner):
    table = torch.randn(3, 4, device=runner.device, requires_grad=True)
    x = torch.zeros(6, 4, device=runner.device)
    buckets = torch.tensor([-1, 3, 1, 2**40, -(2**40), 1], device=runner.device)
    out = bucket_embedding(x, [table], [buckets], backend="triton")
    assert torch.equal(out[[2, 5]], table[[1, 1]]) and not out[[0, 1, 3, 4]].any()
    cotangent = torch.randn(6, 4, device=runner.device)
    (gradient,) = torch.autograd.grad(out, table, cotangent)
    torch.testing.assert_close(gradient[1], cotangent[2] + cotangent[5])
    assert not gradient[[0, 2]].any()


@pytest.mark.parametrize("runner", runners("triton"))
def test_views_and_a_transposed_gradient(runner):
    joint, table = (torch.randn(n, 20, device=runner.device, requires_grad=True) for n in (30, 5))
    buckets = torch.randint(5, (30,), device=runner.device)
    cotangent, pairs = torch.randn(8, 30, device=runner.device).t(), []
    for backend in (runner.backend, "reference"):
        out = bucket_embedding(joint[:, 4:12], [table[:, ::2][:, :8]], [buckets], scale=3.0, backend=backend)
        pairs.append([out, *torch.autograd.grad(out, (joint, table), cotangent)])
    harness.assert_close(*pairs, 1e-5)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("rows", [0, 40])
def test_the_library_op(rows, runner, monkeypatch):
    from recsys.ops.bucket_embedding import triton as triton_ops

    if runner.is_interpreted:
        monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    values = torch.randn(rows, 6, device=runner.device)
    buckets = torch.randint(5, (rows,), device=runner.device)
    harness.opcheck(triton_ops.sum_by_bucket_triton, (values, buckets, 5))
    got = triton_ops.sum_by_bucket_triton(values, buckets, 5)
    want = torch.zeros(5, 6, device=runner.device).index_add(0, buckets, values)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


test_in_the_interpreter = harness.interpreter_test(__file__)
