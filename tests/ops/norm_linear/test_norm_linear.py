"""`norm_linear` and `linear_add` against the formulas, row by row."""

import pytest
import torch
from torch import nn

from recsys.ops import explain, last_backend, linear_add, norm_linear

WIDTHS = (3, 4, 2)


def inputs(rows, width=6, dtype=torch.float64):
    """x, norm_weight, norm_bias, weight and bias, leaves with gradients."""
    generator = torch.Generator().manual_seed(rows)
    columns = sum(WIDTHS)
    shapes = ((rows, width), (width,), (width,), (columns, width), (columns,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def by_rows(x, norm_weight, norm_bias, weight, bias, eps):
    """The formula, an entry after the other."""
    rows = []
    for token in x:
        mean = sum(token) / len(token)
        variance = sum((entry - mean) ** 2 for entry in token) / len(token)
        normed = (token - mean) / torch.sqrt(variance + eps) * norm_weight + norm_bias
        rows.append(torch.stack([sum(one * normed) for one in weight]) + bias)
    return torch.stack(rows)


def gradients(outs, leaves):
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    return torch.autograd.grad(outs, leaves, cotangents)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("keep_normed", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
def test_parts_and_all_gradients_are_those_of_the_formula(rows, keep_normed, silu):
    leaves = inputs(rows)
    found = norm_linear(*leaves, WIDTHS, eps=1e-3, keep_normed=keep_normed, silu=silu)
    assert last_backend("norm_linear") == "reference"
    expected = by_rows(*leaves, eps=1e-3)
    if silu:
        expected = expected / (1 + torch.exp(-expected))
    torch.testing.assert_close(torch.cat(found.parts, dim=1), expected, rtol=1e-12, atol=1e-12)
    assert [part.shape[1] for part in found.parts] == list(WIDTHS)
    outs = [*found.parts, found.x]  # the argument itself takes part in what follows
    wanted = [*expected.split(WIDTHS, dim=1), leaves[0] * 1]
    for got, want in zip(gradients(outs, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_sum_and_all_its_gradients_are_those_of_the_formula(with_bias):
    x, y = (torch.randn(5, size, dtype=torch.float64, requires_grad=True) for size in (4, 3))
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [x, y, weight, bias][: 4 if with_bias else 3]
    out = linear_add(*leaves)
    assert last_backend("linear_add") == "reference"
    rows = [
        torch.stack([own[i] + sum(weight[i] * row) for i in range(4)]) for own, row in zip(x, y, strict=True)
    ]
    expected = torch.stack(rows) + (bias if with_bias else 0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients([out], leaves), gradients([expected], leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_statistics_in_float32_and_products_in_the_given_type():
    """As a layer of PyTorch's modules computes it, and not further from exact than a rounding or two."""
    leaves = inputs(40, 64, dtype=torch.float32)
    x = leaves[0].detach().bfloat16()
    found = norm_linear(x, *leaves[1:], WIDTHS, dtype=torch.bfloat16)
    assert {part.dtype for part in found.parts} == {torch.bfloat16}
    exact = norm_linear(x.double(), *(tensor.double() for tensor in leaves[1:]), WIDTHS)
    for got, want in zip(found.parts, exact.parts, strict=True):
        assert (got.double() - want).norm() <= 2**-7 * want.norm()
    norm = nn.LayerNorm(64, eps=1e-6)
    norm.weight, norm.bias = (nn.Parameter(tensor.detach()) for tensor in leaves[1:3])
    normed = norm(x.float()).bfloat16()
    same = nn.functional.linear(normed, leaves[3].bfloat16(), leaves[4].bfloat16())
    assert torch.equal(torch.cat(found.parts, dim=1), same)


@torch.no_grad()
def test_parts_are_made_where_they_are_to_stay():
    leaves = inputs(7)
    expected = norm_linear(*leaves, WIDTHS).parts
    room = torch.zeros(9, sum(WIDTHS), dtype=torch.float64)
    found = norm_linear(*leaves, WIDTHS, out=room[1:8]).parts
    assert found[0].data_ptr() == room[1:].data_ptr()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not room[0].any() and not room[8].any()


def test_places_are_checked():
    leaves, place = inputs(7), torch.zeros(7, sum(WIDTHS), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no gradients into `out`"):
        norm_linear(*leaves, WIDTHS, out=place)
    with torch.no_grad():
        for out, error, message in (
            (place[:, 1:], ValueError, r"out must be contiguous, of shape \[7, 9\], got \(7, 8\)"),
            (place.float(), TypeError, "out must be torch.float64 on cpu, got torch.float32"),
            (place.t().contiguous().t(), ValueError, r"must be contiguous, .* strides \(1, 7\)"),
        ):
            with pytest.raises(error, match=message):
                norm_linear(*leaves, WIDTHS, out=out)


def test_a_sum_in_place():
    x, y, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (5, 3), (4, 3)))
    expected = x + y @ weight.t()
    kept = x.clone()
    torch.testing.assert_close(linear_add(x, y, weight.requires_grad_(), in_place=True), expected)
    assert torch.equal(x, kept), "not where gradients are asked for"
    with torch.no_grad():
        assert linear_add(x, y, weight, in_place=True) is x
    torch.testing.assert_close(x, expected)


def test_the_sum_has_the_type_of_x():
    x, y, weight = torch.randn(5, 4), torch.randn(5, 3).bfloat16(), torch.randn(4, 3)
    exact = x.double() + y.double() @ weight.double().t()
    for tokens, digits in ((x, 2**-7), (x.bfloat16(), 2**-6)):
        out = linear_add(tokens, y, weight)
        assert out.dtype == tokens.dtype
        assert (out.double() - exact).norm() <= digits * exact.norm()


def arguments(**changes):
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    given = dict(zip(names, (tensor.detach().float() for tensor in inputs(5)), strict=True))
    return given | {"widths": WIDTHS} | changes


WRONG = [
    ({"x": torch.zeros(5)}, ValueError, r"x must have shape \[tokens, width\], .* got \(5,\)"),
    ({"x": torch.zeros(5, 6).long()}, TypeError, "x must be a floating point tensor, got a tensor of"),
    ({"norm_weight": None}, TypeError, "norm_weight must be a floating point tensor, got NoneType"),
    ({"norm_bias": torch.zeros(5)}, ValueError, r"norm_bias must have shape \[6\], got \(5,\)"),
    ({"norm_bias": torch.zeros(6).double()}, TypeError, "norm_bias must have the dtype of its weight"),
    ({"weight": torch.zeros(8, 6)}, ValueError, r"weight must have shape \[9, 6\], got \(8, 6\)"),
    ({"bias": torch.zeros(9, device="meta")}, ValueError, "bias is on meta, x on cpu"),
    ({"widths": [9, 0]}, ValueError, r"widths must be positive numbers, got \[9, 0\]"),
    ({"eps": 0.0}, ValueError, "eps must be positive"),
    ({"dtype": torch.int32}, TypeError, "dtype must be a floating point type, got torch.int32"),
    ({"backend": "cuda"}, ValueError, "norm_linear has no backend 'cuda'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        norm_linear(**arguments(**changes))


WRONG_SUMS = [
    ({"x": torch.zeros(5)}, ValueError, r"x must have two dimensions, got shape \(5,\)"),
    ({"y": torch.zeros(4, 3)}, ValueError, "y must have the rows of x, 5, got 4"),
    ({"weight": torch.zeros(3, 4)}, ValueError, r"weight must have shape \[4, 3\], got \(3, 4\)"),
    ({"bias": torch.zeros(3)}, ValueError, r"bias must have shape \[4\], got \(3,\)"),
    ({"bias": torch.zeros(4).half()}, TypeError, "bias must have the dtype of weight"),
    ({"y": [1.0]}, TypeError, "y must be a floating point tensor, got list"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), WRONG_SUMS, ids=[message for *_, message in WRONG_SUMS]
)
def test_wrong_arguments_of_the_sum_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        linear_add(**{"x": torch.zeros(5, 4), "y": torch.zeros(5, 3), "weight": torch.zeros(4, 3)} | changes)


def test_explain_answers_for_both():
    assert dict(explain("norm_linear", **arguments()).rows)["reference"].ok
    given = (torch.zeros(5, 4), torch.zeros(5, 3), torch.zeros(4, 3))
    assert dict(explain("linear_add", *given).rows)["reference"].ok
