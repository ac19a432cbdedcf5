"""`norm_linear` against the formula, row by row, and its kernels against float64."""

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from recsys.ops import norm_linear
from tests.ops import harness
from tests.ops.harness import Case, OpTests, Problem, normal, runners
from tests.tools.interpreter import interpreted

WIDTHS = (3, 4, 2)
SMALL = {
    "norm_linear.triton": {"FORWARD_ENTRIES": 128, "BACKWARD_ENTRIES": 128, "WORKERS_PER_PROCESSOR": 1},
    "runtime.column_sums": {"PROGRAMS_PER_PROCESSOR": 1, "COLUMNS": 16},
}
"""Several blocks a worker in the interpreter."""


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
        rows.append(torch.stack([sum(row * normed) for row in weight]) + bias)
    return torch.stack(rows)


def parts_and_x(x, product, backend, **named):
    """All outputs of `norm_linear`, the argument among them; exact runs compute in float64 throughout."""
    dtype = None if x.dtype == torch.float64 else product
    made = norm_linear(x, **named, dtype=dtype, backend=backend)
    return [*made.parts, made.x]


def problem(rows, width, tokens=torch.float64, product=None, widths=WIDTHS, **options) -> Problem:
    """`tokens` and `product` are types; parameters are float32 at least."""
    columns = sum(widths)
    shapes = {"norm_weight": (width,), "norm_bias": (width,), "weight": (columns, width), "bias": (columns,)}
    tensors = {name: normal(*shape, seed=len(name)) for name, shape in shapes.items()}
    tensors["weight"] /= width**0.5
    options |= {"widths": widths, "product": product}
    given = Problem("norm_linear", parts_and_x, {"x": normal(rows, width), **tensors}, options)
    return given.cast(torch.promote_types(tokens, torch.float32), x=tokens)


def expected(x, norm_weight, norm_bias, weight, bias, widths, product, eps, keep_normed, silu):
    joined = by_rows(x, norm_weight, norm_bias, weight, bias, eps)
    if silu:
        joined = joined / (1 + torch.exp(-joined))
    return [*joined.split(widths, dim=1), x * 1]


def test_statistics_in_float32_and_products_in_the_given_type():
    """As a layer of PyTorch's modules computes it, and not further from exact than a rounding or two."""
    leaves = inputs(40, 64, dtype=torch.float32)
    x = leaves[0].detach().bfloat16()
    made = norm_linear(x, *leaves[1:], WIDTHS, dtype=torch.bfloat16)
    assert {part.dtype for part in made.parts} == {torch.bfloat16}
    exact = norm_linear(x.double(), *(tensor.double() for tensor in leaves[1:]), WIDTHS)
    for got, want in zip(made.parts, exact.parts, strict=True):
        assert (got.double() - want).norm() <= 2**-7 * want.norm()
    norm = nn.LayerNorm(64, eps=1e-6)
    norm.weight, norm.bias = (nn.Parameter(tensor.detach()) for tensor in leaves[1:3])
    normed = norm(x.float()).bfloat16()
    same = nn.functional.linear(normed, leaves[3].bfloat16(), leaves[4].bfloat16())
    assert torch.equal(torch.cat(made.parts, dim=1), same)


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
]


test_wrong_arguments_are_named = harness.refused(norm_linear, arguments, WRONG)


# --- the kernels ------------------------------------------------------------------------------------------


@st.composite
def random_cases(draw) -> Case:
    width = draw(st.sampled_from([2, 16, 33, 64, 100, 256, 1000, 1024, 2048]))
    widths = draw(st.lists(st.sampled_from([8, 16, 64, 100, 512]), min_size=1, max_size=4))
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    types = draw(st.sampled_from([(bf16, bf16), (fp32, bf16), (fp16, fp16), (fp32, fp32)]))
    options = {"keep_normed": draw(st.booleans()), "silu": draw(st.booleans())}
    near = {"floor": 1e-5, "slack": 1e-5}
    return Case(problem, draw(st.integers(1, 3000)), width, *types, widths=widths, **options, near=near)


def case(rows, width, keep_normed, silu) -> Case:
    options = {"eps": 1e-3, "keep_normed": keep_normed, "silu": silu, "widths": (12, 5, 7)}
    near = {"close": 1e-4, "floor": 1e-5, "slack": 1e-5}
    return Case(problem, rows, width, torch.float32, **options, near=near)


WAYS = [(keep_normed, silu) for keep_normed in (True, False) for silu in (True, False)]
TESTS = OpTests(
    expected=expected,
    exact=[
        Case(problem, rows, 6, eps=1e-3, keep_normed=keep_normed, silu=silu)
        for rows in (1, 7)
        for keep_normed, silu in WAYS
    ],
    # Over several blocks and workers in every way, other shapes in one way each.
    kernels=[case(150, 20, *way) for way in WAYS]
    + [case(*shape, *way) for shape, way in zip([(7, 6), (1, 33), (0, 6), (40, 1)], WAYS, strict=True)],
    halves=[
        lambda half: Case(problem, 60, 24, half, product=half),
        lambda half: Case(problem, 60, 24, torch.float32, product=half),
    ],
    strided=case(30, 6, True, True),
    random=random_cases(),
)


@pytest.mark.parametrize("runner", runners("triton"))
def test_the_parts_lie_side_by_side_and_their_gradients_too(runner):
    leaves = [t.detach().to(runner.device, torch.float32).requires_grad_() for t in inputs(9)]
    made = norm_linear(*leaves, WIDTHS, backend="triton")
    places = [made.grad_buffer.place(part) for part in made.parts]
    for part, place, first in zip(made.parts, places, (0, 3, 7), strict=True):
        assert part.stride() == place.stride() == (sum(WIDTHS), 1)
        assert part.storage_offset() == place.storage_offset() == first
        place.fill_(1.0)
    got = torch.autograd.grad(made.parts, leaves[0], places)[0]
    same = norm_linear(*leaves, WIDTHS, backend="reference").parts
    want = torch.autograd.grad([part.sum() for part in same], leaves[0])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize(("rows", "silu"), [(0, True), (7, True), (7, False)])
def test_parts_without_gradients(rows, silu, runner):
    tensors = [tensor.detach().to(runner.device, torch.float32) for tensor in inputs(rows)]
    parts, wanted = (
        norm_linear(*tensors, WIDTHS, silu=silu, backend=backend).parts for backend in ("triton", "reference")
    )
    harness.assert_close(parts, wanted, 1e-4)


@interpreted
def test_parameters_that_need_no_gradient_get_none():
    x, *parameters = [tensor.detach().float() for tensor in inputs(9)]
    x.requires_grad_()
    norm_linear(x, *parameters, WIDTHS, backend="triton").parts[0].sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in parameters)


@interpreted
@pytest.mark.parametrize("autocast", [True, False])
def test_without_gradients_the_same_numbers_and_no_buffer(autocast):
    given = [tensor.detach().float() for tensor in inputs(30, 20)]
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        made = norm_linear(*given, WIDTHS, dtype=torch.float16, backend="triton")
        with torch.no_grad():
            again = norm_linear(*given, WIDTHS, dtype=torch.float16, backend="triton")
    assert made.grad_buffer is not None and again.grad_buffer is None and again.x is given[0]
    harness.assert_equal(made.parts, again.parts)


test_in_the_interpreter = harness.interpreter_test(__file__)
