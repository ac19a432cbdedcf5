"""`bucket_embedding` against sums over lists, its kernels against float64, and wrong arguments."""

import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import bucket_embedding
from tests.ops import harness
from tests.ops.harness import Case, OpTests, Problem, normal, runners
from tests.tools.interpreter import interpreted

FEW = {"ENTRIES": 32, "LONGEST_BLOCK": 8, "SHORT_PIECE": 8, "PIECES": 4, "SMALLEST_PIECE": 8}
SMALL = {
    "jagged.triton": {"BLOCK_BYTES": 256, "LONGEST_BLOCK": 16, "SHORTEST_BLOCK": 8},
    "bucket_embedding.triton": FEW | {"SHARE_COLUMNS": 4},
}
"""Several programs, rows in several blocks of columns, buckets in several pieces, in the interpreter."""


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


def test_the_output_holds_all_types():
    x, table, buckets = (
        torch.ones(2, 1).bfloat16(),
        torch.full((1, 1), 2.0**-20),
        torch.zeros(2, dtype=torch.int32),
    )
    assert bucket_embedding(x, [table], [buckets]).tolist() == [[1 + 2.0**-20]] * 2
    assert bucket_embedding(x, [table.bfloat16()], [buckets]).dtype == torch.bfloat16


def arguments(**changes):
    given = {"x": torch.zeros(4, 2), "tables": [torch.zeros(3, 2)]}
    return given | {"buckets": [torch.zeros(4, dtype=torch.int64)]} | changes


LONG = torch.zeros(4, 2, dtype=torch.int64)
WRONG = [
    ({"x": LONG}, TypeError, "x must be floating point, got torch.int64"),
    ({"x": torch.zeros(4)}, ValueError, r"x must have shape \[tokens, width\], got \(4,\)"),
    ({"tables": []}, ValueError, "tables and buckets must be pairs, got 0 and 1 of them"),
    ({"tables": [torch.zeros(3, 3)]}, ValueError, r"s\[0\] must have shape \[buckets, 2\], got \(3, 3\)"),
    ({"tables": [LONG]}, TypeError, r"tables\[0\] must be floating point, got torch.int64"),
    ({"tables": [torch.zeros(3, 2, device="meta")]}, ValueError, r"tables\[0\] is on meta, x on cpu"),
    ({"buckets": [torch.zeros(4)]}, TypeError, r"buckets\[0\] must be int64 or int32, got torch.float32"),
    ({"buckets": [LONG[:3, 0]]}, ValueError, r"buckets\[0\] must have shape \[4\], .* got \(3,\)"),
    ({"buckets": [torch.tensor([0, 1, 2, 3])]}, IndexError, "index out of range"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
]

test_wrong_arguments_are_named = harness.refused(bucket_embedding, arguments, WRONG)


# --- the kernels ------------------------------------------------------------------------------------------


@st.composite
def random_cases(draw) -> Case:
    width, dtype = draw(st.sampled_from([(256, torch.float32), (100, torch.bfloat16)]))
    sizes = draw(st.lists(st.sampled_from([1, 65, 254, 255, 5000, 40_000]), min_size=1, max_size=3))
    options = {"hot": draw(st.sampled_from([0, 0.9])), "scale": draw(st.sampled_from([1.0, 16.0]))}
    return Case(problem, draw(st.integers(0, 3000)), width, sizes, dtype, **options)


def library(device):
    from recsys.ops.bucket_embedding import triton as triton_ops

    for rows in (0, 40):
        values, buckets = torch.randn(rows, 6, device=device), torch.randint(5, (rows,), device=device)
        yield triton_ops.sum_by_bucket_triton, (values, buckets, 5), False
        want = torch.zeros(5, 6, device=device).index_add(0, buckets, values)
        harness.assert_close([triton_ops.sum_by_bucket_triton(values, buckets, 5)], [want], 1e-5)


def case(rows, width, sizes, dtype=torch.float32, **options) -> Case:
    near = {"close": 1e-3 if dtype == torch.float16 else 1e-5, "floor": 1e-5}
    return Case(problem, rows, width, sizes, dtype, hot=0.5, near=near, **options)


TESTS = OpTests(
    expected=by_lists,
    exact=[
        Case(problem, rows, 3, sizes, scale=scale)
        for rows, sizes in ((0, [5]), (1, [1, 7]), (20, [5]), (20, [1, 7]), (20, [3, 2, 4]))
        for scale in (1.0, 0.3)
    ],
    # No rows and few, narrow rows and some of several blocks, one to three tables, short ones and long.
    kernels=[
        case(0, 6, [5]),
        case(1, 16, [1, 40], scale=1.0),
        case(9, 24, [5, 1, 40]),
        case(70, 1, [40], ids=torch.int32),
        case(70, 6, [1, 5], scale=1.0),
        case(70, 24, [40, 5, 5], ids=torch.int32, scale=1.0),
        case(70, 16, [5]),
        case(70, 24, [1, 40], torch.float16),
        case(9, 6, [40, 5, 1], torch.float16, ids=torch.int32, scale=1.0),
    ],
    strided=case(30, 8, [5]),
    random=random_cases(),
    library=library,
    wrapped=["bucket_embedding.triton"],
)


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


test_in_the_interpreter = harness.interpreter_test(__file__)
