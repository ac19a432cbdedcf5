"""Row movement and pooling against Python lists; gradients against finite differences."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import gather_rows, segment_sum


@hypothesis.given(data=st.data())
def test_rows_go_where_the_index_says_and_gradients_come_back(data):
    num_rows = data.draw(st.integers(0, 8))
    rows = data.draw(st.permutations(range(num_rows)))
    index = rows[: data.draw(st.integers(0, num_rows))]
    for _ in range(data.draw(st.integers(0, 3))):
        index.insert(data.draw(st.integers(0, len(index))), -1)
    values = torch.randn(num_rows, 2, 3, dtype=torch.float64, requires_grad=True)
    out = gather_rows(values, torch.tensor(index, dtype=torch.int64))
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(out, torch.stack([*(values[i] if i >= 0 else zero for i in index), zero])[:-1])

    cotangent = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, values, cotangent)
    expected = [cotangent[index.index(t)] if t in index else zero for t in range(num_rows)]
    assert torch.equal(gradient, torch.stack([*expected, zero])[:-1])
    inverse = torch.tensor([index.index(t) if t in index else -1 for t in range(num_rows)], dtype=torch.int64)
    out = gather_rows(values, torch.tensor(index, dtype=torch.int64), inverse)
    assert torch.equal(torch.autograd.grad(out, values, cotangent)[0], gradient)


@hypothesis.given(data=st.data())
def test_several_sources_are_one_and_several_maps_add_their_gradients(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    maps = [data.draw(st.permutations([*range(sum(sizes)), -1])) for _ in range(data.draw(st.integers(1, 3)))]
    maps = [one[: data.draw(st.integers(0, len(one)))] for one in maps]
    values = [torch.randn(size, 2, dtype=torch.float64, requires_grad=True) for size in sizes]
    out = gather_rows(values, [torch.tensor(one, dtype=torch.int64) for one in maps])
    rows = [*torch.cat(values).tolist(), [0.0, 0.0]]
    assert out.tolist() == [rows[row] for one in maps for row in one]
    cotangent = torch.randn_like(out)
    expected = torch.zeros(sum(sizes) + 1, 2, dtype=torch.float64)
    for place, row in enumerate(row for one in maps for row in one):
        expected[row] += cotangent[place]
    for got, want in zip(
        torch.autograd.grad(out, values, cotangent), expected[:-1].split(sizes), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


def test_sums_of_gradients_are_rounded_once():
    values = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    out = gather_rows(values, [torch.tensor([0])] * 3)
    cotangent = torch.tensor([1.0, 2.0**-8, 2.0**-8], dtype=torch.bfloat16)  # 1 + 2^-8 alone rounds to 1
    assert torch.autograd.grad(out, values, cotangent)[0].item() == 1 + 2.0**-7


def test_integers_move_too_and_nan_stays_where_it_is():
    stamps = torch.tensor([2**62 + 1, 7, 9])
    assert gather_rows(stamps, torch.tensor([2, -1, 0])).tolist() == [9, 0, 2**62 + 1]
    values = torch.tensor([[float("nan")], [1.0]])
    assert gather_rows(values, torch.tensor([1, -1])).tolist() == [[1.0], [0.0]]


def test_a_row_named_twice_is_an_error_and_no_lost_gradient():
    values = torch.randn(3, 2, requires_grad=True)
    out = gather_rows(values, torch.tensor([0, 2, 0, -1, -1]))
    with pytest.raises(ValueError, match="index names 1 rows more than once"):
        out.sum().backward()


@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 0], [0, 0], [], [5], [1, 1, 1]])
def test_segments_add_up_and_empty_ones_are_zero(lengths, lengths_dtype):
    values = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    pooled = segment_sum(values, torch.tensor(lengths, dtype=lengths_dtype))
    assert pooled.shape == (len(lengths), 2)
    start = 0
    for row, length in zip(pooled.tolist(), lengths, strict=True):
        expected = [sum(values[start + n, e].item() for n in range(length)) for e in range(2)]
        assert row == pytest.approx(expected, abs=1e-12)
        start += length
    if values.numel():
        assert torch.autograd.gradcheck(lambda v: segment_sum(v, torch.tensor(lengths)), values)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: gather_rows(torch.zeros(2), torch.zeros(2)),
            TypeError,
            "index must be int64 or int32, got torch.float32",
        ),
        (
            lambda: gather_rows(torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64)),
            ValueError,
            r"index must have one dimension, got shape \(1, 2\)",
        ),
        (
            lambda: gather_rows(torch.zeros(()), torch.zeros(1, dtype=torch.int64)),
            ValueError,
            "values must have at least one dimension",
        ),
        (
            lambda: gather_rows(torch.zeros(2, device="meta"), torch.tensor([1])),
            ValueError,
            "index is on cpu, values on meta",
        ),
        (
            lambda: gather_rows([torch.zeros(2, 3), torch.zeros(2, 4)], torch.tensor([1])),
            ValueError,
            r"first size only, values\[1\] has shape \(2, 4\) of torch.float32, the first one \(2, 3\)",
        ),
        (
            lambda: gather_rows([torch.zeros(2), torch.zeros(2).double()], torch.tensor([1])),
            ValueError,
            r"values\[1\] has shape \(2,\) of torch.float64",
        ),
        (lambda: gather_rows([], torch.tensor([1])), ValueError, "values must be a tensor or some of them"),
        (
            lambda: gather_rows(torch.zeros(2), [torch.tensor([1]), torch.zeros(1)]),
            TypeError,
            r"index\[1\] must be int64 or int32, got torch.float32",
        ),
        (
            lambda: gather_rows(torch.zeros(2), torch.tensor([1]), torch.tensor([0])),
            ValueError,
            r"inverse must have shape \[2\], a place for each row of values, got \(1,\)",
        ),
        (
            lambda: gather_rows(torch.zeros(2), [torch.tensor([1])] * 2, torch.tensor([-1, 0])),
            ValueError,
            r"inverse must have two dimensions, got shape \(2,\)",
        ),
        (
            lambda: gather_rows(torch.zeros(2), torch.tensor([1]), backend="cuda"),
            ValueError,
            "gather_rows has no backend 'cuda'; it has auto, triton, reference",
        ),
        (
            lambda: segment_sum(torch.zeros(3, 1), torch.tensor([1, 1])),
            ValueError,
            "lengths add up to 2, but values has 3 rows",
        ),
        (lambda: segment_sum(torch.zeros(3, 1), torch.zeros(2)), TypeError, "lengths must be int32 or int64"),
        (
            lambda: segment_sum(torch.zeros(3, dtype=torch.int64), torch.tensor([3])),
            TypeError,
            "values must be floating point rows",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
