"""`gated_norm` against the formulas, row by row, its kernels against float64, and its random numbers."""

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from recsys.ops import gated_norm
from recsys.ops.gated_norm import reference as counter
from tests.ops import harness
from tests.ops.harness import Case, OpTests, Problem, Runner, assert_near, gradients

SEED = torch.tensor([-123_456_789_012_345_678])
GATES = ("ugn", "concat")
SMALL = {"gated_norm.triton": {"ENTRIES": 256, "WORKERS_PER_PROCESSOR": 1}}
"""Several blocks a worker in the interpreter."""


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


def by_rows(attended, u, weight, bias, *, num_groups=1, eps=1e-6, gate="concat", dropout=0.0, seed=None):
    """The formulas, a row, a group and an entry after the other."""
    a, rows = attended, []
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


def problem(rows, width, dtype=torch.float64, **options) -> Problem:
    """Float32 parameters beside 16-bit tokens."""
    given = dict(zip(("attended", "u", "weight", "bias"), inputs(rows, width), strict=True))
    wide = torch.promote_types(dtype, torch.float32)
    return Problem("gated_norm", gated_norm, given, options).cast(dtype, weight=wide, bias=wide)


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
    next_seed = counter.kept(torch.tensor([78]), 2000, 1000, probability).double()
    far = counter.kept(torch.tensor([77 + 2**32]), 2000, 1000, probability).double()
    pairs = [(kept[lag:], kept[:-lag]) for lag in (1, 2, 256)]
    pairs += [(kept[:, lag:], kept[:, :-lag]) for lag in (1, 2, 256)]
    for first, second in [*pairs, (kept, next_seed), (kept, far)]:
        covariance = ((first - 1 + probability) * (second - 1 + probability)).mean() / variance
        assert abs(covariance) < 5 / first.numel() ** 0.5
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


@pytest.mark.parametrize("gate", ["ugn", "concat"])
def test_bfloat16_with_float32_parameters_is_rounded_once(gate):
    leaves = inputs(40, 64, torch.float32)
    rounded = [tensor.detach().bfloat16() for tensor in leaves[:2]]
    out = gated_norm(*rounded, *leaves[2:], gate=gate)
    exact = gated_norm(*(t.double() for t in rounded), *(t.double() for t in leaves[2:]), gate=gate)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=1e-6)
    assert (out == exact.bfloat16()).double().mean() > 0.99


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
    """Numbers of the module turn into constants, which may count as a second trace."""
    counts, gate = CompileCounterWithBackend("aot_eager"), Gate()
    compiled = torch.compile(gate, backend=counts, fullgraph=True, dynamic=True)
    traced = []
    for rows in (50, 9):
        leaves = inputs(rows, 6)
        got, want = compiled(*leaves, SEED), gate(*leaves, SEED)
        torch.testing.assert_close(got, want)
        harness.assert_close(gradients([got], leaves), gradients([want], leaves), 1e-7)
        traced.append(counts.frame_count)
    assert traced[0] == traced[-1]
    with torch.no_grad():  # the gradients of another graph would take as long again
        assert not torch.equal(*(compiled(*inputs(50, 6)) for _ in range(2)))


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
]


test_wrong_arguments_are_named = harness.refused(gated_norm, arguments, WRONG)


# --- the kernels ------------------------------------------------------------------------------------------


def case(rows, width, dtype, gate="concat", dropout=0.2, **options) -> Case:
    """The norm of a single number is 0, with a slope of 1 / sqrt(eps): rounding shows."""
    floor = 1e-3 if width == options.get("num_groups", 1) else 1e-5
    near = {"close": 1e-4 if dtype == torch.float32 else None, "floor": floor, "slack": floor}
    return Case(problem, rows, width, dtype, gate=gate, dropout=dropout, seed=SEED, near=near, **options)


@st.composite
def random_cases(draw) -> Case:
    groups = draw(st.sampled_from([1, 2, 4]))
    width = groups * draw(st.sampled_from([1, 16, 33, 64, 100, 256, 1000, 1024]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    options = {"gate": draw(st.sampled_from(GATES)), "dropout": draw(st.sampled_from([0.0, 0.1, 0.5]))}
    return case(draw(st.integers(1, 3000)), width, dtype, num_groups=groups, **options)


def assert_right(given: Problem, runner: Runner, **near) -> None:
    """Near float64; dropped entries are 0, and those that stay are not, unless they are almost 0 anyway."""
    compared = assert_near(given, runner, **near)
    ours, exact = compared.ours[0], compared.exact[0]
    if given.options["dropout"] and ours.numel():
        kept = counter.kept(SEED, *ours.shape, given.options["dropout"]).to(ours.device)
        assert not ours[~kept].any()
        assert ours[kept & (exact.abs() > 1e-3)].all()


def library(device):
    from recsys.ops.gated_norm import triton as triton_ops

    for rows, seed, dropout in ((0, None, 0.0), (40, None, 0.0), (40, SEED.to(device), 0.4)):
        given = [tensor.detach().to(device, torch.float32).requires_grad_() for tensor in inputs(rows, 12)]
        arguments = (*given, seed, 2, 1e-6, True, dropout, False)
        yield triton_ops.gated_norm_triton, arguments, True
        cotangent = torch.randn(rows, 36, device=device)
        detached = (cotangent, *(tensor.detach() for tensor in given), *arguments[4:])
        yield triton_ops.gated_norm_triton_backward, detached, False
        options = {"num_groups": 2, "dropout": dropout, "seed": seed, "backend": "triton"}
        outs = (triton_ops.gated_norm_triton(*arguments), gated_norm(*given, **options))
        harness.assert_equal(*(torch.autograd.grad(out, given, cotangent) for out in outs))


WAYS = list(itertools.product(GATES, (0.0, 0.4)))
# Within a block, one row, one column a group, no row.
SHAPES = [(7, 6, 1), (1, 33, 1), (70, 3, 3), (5, 130, 1), (0, 6, 2)]
TESTS = OpTests(
    compare=assert_right,
    expected=by_rows,
    exact=[
        Case(problem, rows, 6, num_groups=groups, eps=1e-3, gate=gate, dropout=dropout, seed=SEED)
        for rows, groups in ((1, 3), (7, 1), (7, 3))
        for gate, dropout in WAYS
    ],
    # Over several blocks and workers in every way, other shapes in one way each.
    kernels=[case(300, 20, torch.float32, *way, num_groups=2, eps=1e-3) for way in WAYS]
    + [
        case(rows, width, torch.float32, *way, num_groups=groups, eps=1e-3)
        for (rows, width, groups), way in zip(SHAPES, WAYS[::-1] + WAYS, strict=False)
    ],
    halves=[lambda half, gate=gate: case(60, 24, half, gate, num_groups=2) for gate in GATES],
    strided=case(50, 12, torch.float32, "ugn", 0.0),
    guarded=case(33, 20, torch.float32, num_groups=2, dropout=0.0),
    on_gpus=[case(77, width, torch.bfloat16) for width in (4096, 2000)],
    random=random_cases(),
    library=library,
    wrapped=["gated_norm.triton"],
)


@pytest.mark.gpu
def test_nothing_waits_for_a_seed():
    given = problem(500, 128, torch.bfloat16, dropout=0.2)
    harness.assert_nothing_waits(given, Runner("triton", "cuda"))
