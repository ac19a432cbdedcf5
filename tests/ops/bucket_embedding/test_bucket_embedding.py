"""`bucket_embedding` against sums over lists, token by token, and what it says of wrong arguments."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from recsys.ops import bucket_embedding, explain, last_backend


def by_lists(x, *tables, buckets, scale, cotangent):
    """The output and all gradients in float64."""
    rows = [scale * row for row in x.double()]
    gradients = [torch.zeros(table.shape, dtype=torch.float64) for table in tables]
    for t in range(len(rows)):
        for table, own, gradient in zip(tables, buckets, gradients, strict=True):
            rows[t] = rows[t] + table[int(own[t])].double()
            gradient[int(own[t])] += cotangent[t].double()
    out = torch.stack([*rows, torch.zeros(x.shape[1], dtype=torch.float64)])[:-1]
    return out, [scale * cotangent.double(), *gradients]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("sizes", [[5], [1, 7], [3, 2, 4]])
@pytest.mark.parametrize("rows", [0, 1, 20])
def test_output_and_all_gradients(rows, sizes, scale):
    leaves = [torch.randn(size, 3, dtype=torch.float64, requires_grad=True) for size in (rows, *sizes)]
    buckets = [torch.randint(size, (rows,)) for size in sizes]
    out = bucket_embedding(leaves[0], leaves[1:], buckets, scale=scale)
    assert last_backend("bucket_embedding") == "reference"
    cotangent = torch.randn_like(out)
    want, gradients = by_lists(
        *(one.detach() for one in leaves), buckets=buckets, scale=scale, cotangent=cotangent
    )
    torch.testing.assert_close(out, want)
    for got, exact in zip(torch.autograd.grad(out, leaves, cotangent), gradients, strict=True):
        torch.testing.assert_close(got, exact)


def test_the_output_holds_all_types():
    x, table, buckets = (
        torch.ones(2, 1).bfloat16(),
        torch.full((1, 1), 2.0**-20),
        torch.zeros(2, dtype=torch.int32),
    )
    assert bucket_embedding(x, [table], [buckets]).tolist() == [[1 + 2.0**-20]] * 2
    assert bucket_embedding(x, [table.bfloat16()], [buckets]).dtype == torch.bfloat16


def test_a_compiled_graph_is_traced_once():
    counts = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bucket_embedding, backend=counts, fullgraph=True, dynamic=True)
    traced = []
    for rows in (50, 9, 33):
        x, table = torch.randn(rows, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
        buckets = torch.randint(7, (rows,))
        got, want = compiled(x, [table], [buckets]), bucket_embedding(x, [table], [buckets])
        torch.testing.assert_close(got, want)
        traced.append(counts.frame_count)
    assert traced[0] == traced[-1]  # the first may count twice, before the scale is a constant


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
    (
        {"backend": "cuda"},
        ValueError,
        "bucket_embedding has no backend 'cuda'; it has auto, triton, reference",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        bucket_embedding(**arguments(**changes))


def test_explain_answers_for_it():
    assert dict(explain("bucket_embedding", **arguments()).rows)["reference"].ok
