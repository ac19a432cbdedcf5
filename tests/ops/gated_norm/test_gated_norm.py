"""`gated_norm` against the formulas, row by row, and what its random numbers must be like."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.ops import explain, gated_norm, last_backend
from recsys.ops.gated_norm import counter

SEED = torch.tensor([-123_456_789_012_345_678])


def inputs(rows, width, dtype=torch.float64, seed=0):
    """a, u, weight and bias, leaves with gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (rows, width), (width,), (width,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def bits(seed: int, row: int, column: int) -> int:
    """The random bits of a place in Python's integers, from the formula."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    low, high = seed % 2**32, (seed >> 32) % 2**32
    return mix((mix((mix(row ^ low) + high) % 2**32) + column * 0x9E3779B9) % 2**32)


def by_rows(a, u, weight, bias, *, num_groups=1, eps=1e-6, gate="concat", dropout=0.0, seed=None):
    """The formulas, a row, a group and an entry after the other."""
    rows = []
    size = a.shape[1] // num_groups
    for t in range(a.shape[0]):
        normed = []
        for group in range(num_groups):
            part = a[t, group * size : (group + 1) * size]
            mean = sum(part) / size
            variance = sum((x - mean) ** 2 for x in part) / size
            normed += [(x - mean) / torch.sqrt(variance + eps) for x in part]
        y = [u[t, c] * (normed[c] * weight[c] + bias[c]) for c in range(a.shape[1])]
        if gate == "concat":
            y = [*u[t], *a[t], *y]
        if dropout:
            kept = [bits(int(seed), t, c) >= dropout * 2**32 for c in range(len(y))]
            y = [x / (1 - dropout) if keep else x * 0 for x, keep in zip(y, kept, strict=True)]
        rows.append(torch.stack(y))
    return torch.stack(rows)


def gradients(out, leaves):
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("gate", ["ugn", "concat"])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("rows", [1, 7])
def test_output_and_all_gradients_are_those_of_the_formulas(rows, num_groups, gate, dropout):
    leaves = inputs(rows, 6)
    options = {"num_groups": num_groups, "eps": 1e-3, "gate": gate, "dropout": dropout, "seed": SEED}
    out = gated_norm(*leaves, **options)
    assert last_backend("gated_norm") == "reference"
    expected = by_rows(*leaves, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_it_is_what_the_modules_of_a_layer_compute(num_groups):
    a, u, weight, bias = inputs(9, 16, torch.float32)
    norm = LayerNorm(16) if num_groups == 1 else HeadNorm(num_groups, 4)
    norm.weight, norm.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    gated = u * norm(a)
    concat = gated_norm(a, u, weight, bias, num_groups=num_groups)
    torch.testing.assert_close(concat, torch.cat([u, a, gated], dim=1))
    plain = gated_norm(a, u, weight, bias, num_groups=num_groups, gate="ugn")
    torch.testing.assert_close(plain, gated)


@hypothesis.given(st.integers(-(2**63), 2**63 - 1), st.floats(0, 0.999))
def test_the_entries_that_stay_follow_from_seed_and_place(seed, probability):
    kept = counter.kept(torch.tensor([seed]), 5, 4, probability)
    limit = counter.threshold(probability)
    assert kept.tolist() == [[bits(seed, row, column) >= limit for column in range(4)] for row in range(5)]


def test_bits_of_far_rows_and_the_threshold_at_its_ends():
    assert counter.threshold(0.0) == 0 and counter.threshold(0.25) == 2**30
    assert counter.kept(SEED, 4, 4, 0.0).all()
    assert counter.threshold(math.nextafter(1, 0)) == 2**32 - 1


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_as_many_stay_as_should_and_neighbours_do_not_know_of_each_other(probability):
    """Means over 2e6 entries, and correlations of neighbours in rows, columns and seeds, within 5 sigma."""
    kept = counter.kept(torch.tensor([77]), 2000, 1000, probability).double()
    variance = probability * (1 - probability)
    assert abs(kept.mean() - (1 - probability)) < 5 * (variance / kept.numel()) ** 0.5
    other = counter.kept(torch.tensor([78]), 2000, 1000, probability).double()
    far = counter.kept(torch.tensor([77 + 2**32]), 2000, 1000, probability).double()
    pairs = [(kept[lag:], kept[:-lag]) for lag in (1, 2, 256)]
    pairs += [(kept[:, lag:], kept[:, :-lag]) for lag in (1, 2, 256)]
    for one, two in [*pairs, (kept, other), (kept, far)]:
        covariance = ((one - 1 + probability) * (two - 1 + probability)).mean() / variance
        assert abs(covariance) < 5 / one.numel() ** 0.5
    for dim, size in ((0, 2000), (1, 1000)):  # no row or column is kept more often than chance has it
        deviation = (kept.mean(dim) - (1 - probability)) / (variance / size) ** 0.5
        assert deviation.abs().max() < 5 and 0.9 < deviation.std() < 1.1


def test_without_a_seed_it_draws_one():
    leaves = inputs(6, 50)
    torch.manual_seed(3)
    first, second = (gated_norm(*leaves, dropout=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(gated_norm(*leaves, dropout=0.5), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    gated_norm(*leaves)  # without dropout it draws nothing
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_does_not_depend_on_the_rows_after_it():
    leaves = inputs(6, 8)
    out = gated_norm(*leaves, dropout=0.5, seed=SEED)
    few = gated_norm(leaves[0][:2], leaves[1][:2], *leaves[2:], dropout=0.5, seed=SEED)
    assert torch.equal(few, out[:2])


@pytest.mark.parametrize("gate", ["ugn", "concat"])
def test_bfloat16_with_float32_parameters_is_rounded_once(gate):
    leaves = inputs(40, 64, torch.float32)
    rounded = [tensor.detach().bfloat16() for tensor in leaves[:2]]
    out = gated_norm(*rounded, *leaves[2:], gate=gate)
    exact = gated_norm(*(t.double() for t in rounded), *(t.double() for t in leaves[2:]), gate=gate)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=1e-6)
    assert (out == exact.bfloat16()).double().mean() > 0.99


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_batch_without_rows(dropout):
    leaves = inputs(0, 6)
    out = gated_norm(*leaves, num_groups=2, dropout=dropout)
    assert out.shape == (0, 18)
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), leaves))


def test_equal_columns_are_no_division_by_zero():
    leaves = inputs(2, 5)
    out = gated_norm(torch.full_like(leaves[0], 3.0).requires_grad_(), *leaves[1:], gate="ugn")
    torch.testing.assert_close(out, leaves[1] * leaves[3])


class Gate(nn.Module):
    """As a layer holds it: its numbers are attributes."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.eps = 1e-3

    def forward(self, a, u, weight, bias, seed=None):
        p = self.dropout.p if self.training else 0.0
        return gated_norm(a, u, weight, bias, num_groups=2, eps=self.eps, dropout=p, seed=seed)


def test_a_compiled_graph_is_traced_once_and_draws_anew():
    counts, gate = CompileCounterWithBackend("aot_eager"), Gate()
    compiled = torch.compile(gate, backend=counts, fullgraph=True, dynamic=True)
    traced = []
    for rows in (50, 9, 33):
        leaves = inputs(rows, 6)
        got, want = compiled(*leaves, SEED), gate(*leaves, SEED)
        torch.testing.assert_close(got, want)
        for one, other in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
            torch.testing.assert_close(one, other)
        traced.append(counts.frame_count)
    assert traced[0] == traced[-1]  # the first may count twice: numbers of the module turned into constants
    leaves = inputs(50, 6)
    first, second = (compiled(*leaves) for _ in range(2))
    assert not torch.equal(first, second)


def arguments(**changes):
    a, u, weight, bias = (tensor.detach().float() for tensor in inputs(5, 6))
    return {"attended": a, "u": u, "weight": weight, "bias": bias} | changes


WRONG = [
    ({"attended": torch.zeros(5, 2, 3)}, ValueError, r"attended must have shape .* got \(5, 2, 3\)"),
    ({"attended": torch.zeros(5, 6, dtype=torch.int64)}, TypeError, "attended must be a floating point"),
    ({"u": None}, TypeError, "u must be a floating point tensor, got NoneType"),
    ({"u": torch.zeros(4, 6)}, ValueError, r"u must have the shape of attended, \(5, 6\), got \(4, 6\)"),
    ({"u": torch.zeros(5, 6).half()}, TypeError, "u must have the dtype of attended, torch.float32, got"),
    ({"weight": torch.zeros(5)}, ValueError, r"weight must have shape \[6\], got \(5,\)"),
    ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias is on meta, attended on cpu"),
    ({"bias": torch.zeros(6).double()}, TypeError, "bias must have the dtype of weight, torch.float32"),
    ({"num_groups": 4}, ValueError, "num_groups must divide the width 6, got 4"),
    ({"num_groups": 2.0}, TypeError, "num_groups must be an int, got float"),
    ({"gate": "sum"}, ValueError, "gate must be one of ugn, concat, got 'sum'"),
    ({"eps": 0}, ValueError, "eps must be positive and finite, got 0"),
    ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
    ({"dropout": float("nan")}, ValueError, "dropout must be finite, got nan"),
    ({"dropout": 0.5, "seed": 3}, TypeError, "seed must be an int64 tensor, got int"),
    ({"dropout": 0.5, "seed": torch.tensor(3)}, ValueError, r"seed must have shape \[1\], got \(\)"),
    ({"seed": SEED.to("meta")}, ValueError, "seed is on meta, attended on cpu"),
    (
        {"backend": "cuda"},
        ValueError,
        "gated_norm has no backend 'cuda'; it has auto, triton, reference",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        gated_norm(**arguments(**changes))


def test_explain_answers_for_it():
    assert dict(explain("gated_norm", **arguments()).rows)["reference"].ok
