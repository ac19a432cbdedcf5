"""The Triton kernels of `linear_logp` on a CPU: numbers, not code generation."""

import math

import pytest
import torch

from recsys.ops import explain, last_backend, linear_logp, linear_lse
from recsys.ops.linear_logp import norms_of
from recsys.ops.linear_logp.recompute import SHORTEST
from tests.ops import harness
from tests.ops.linear_logp.problems import cotangents, gradients, leaves_of, problem
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
)

# (rows, candidates, width): several tiles and parts of both, fewer than a tile, odd widths.
SHAPES = [(70, 150, 20), (5, 33, 64), (130, 3, 7), (64, 96, 16), (1, 1, 1)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles of both operands."""
    if not INTERPRETED:
        return
    from recsys.ops.linear_logp import triton_ops

    small = dict.fromkeys((64, 128, 256, 512), triton_ops.Blocks(32, 16, 4, 1))
    for table in (triton_ops.FORWARD, triton_ops.OF_HIDDEN, triton_ops.OF_WEIGHT):
        for kind in table:
            monkeypatch.setitem(table, kind, small)


def cast(given, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def poisoned(given):
    """Every operand as a view into others' numbers, which are absurd."""
    return {name: between_poison(value) if value.dim() else value for name, value in given.items()}


def results(given, backend):
    """Both outputs and all gradients, for random cotangents."""
    leaves = leaves_of(given)
    out = linear_logp(**given, backend=backend)
    assert last_backend("linear_logp") == backend
    return [*(one.detach() for one in out), *gradients(out, leaves)]


@interpreted
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("bias", "ids"), [(False, False), (True, True)])
@pytest.mark.parametrize(("rows", "candidates", "width"), SHAPES)
def test_outputs_and_all_gradients(rows, candidates, width, bias, ids, split, monkeypatch):
    from recsys.ops.linear_logp import triton_ops

    monkeypatch.setitem(triton_ops.SPLIT_WIDTH, 4, 128 if split else 0)
    exact = problem(rows, candidates, width, bias=bias, ids=ids)
    got = results(poisoned(cast(exact, torch.float32)), "triton")
    for one, other in zip(got, results(exact, "reference"), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("ids", [False, True])
def test_normalised_rows(ids):
    exact = problem(70, 150, 20, bias=ids, ids=ids)
    exact["hidden"][2], exact["weight"][5] = 0, exact["weight"][5] * 1e-9
    normal = {"l2_normalize": True}
    got = results(poisoned(cast(exact, torch.float32)) | normal, "triton")
    for one, other in zip(got, results(exact | normal, "reference"), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@interpreted
def test_the_gradient_of_the_temperature_is_not_made_of_rounded_ones():
    """One row, one candidate: hidden's and the weight's gradient are rounded to three digits, the
    temperature's is d lse z / -temperature, once."""
    hidden, weight = (
        torch.full((1, 16), 0.5, dtype=torch.float16),
        torch.full((1, 16), 0.75, dtype=torch.float16),
    )
    temperature = torch.tensor(0.7, requires_grad=True)
    upstream = torch.tensor([1.000488])  # rounds to 1 in float16
    lse = linear_lse(hidden, weight, temperature=temperature, backend="triton")
    (gradient,) = torch.autograd.grad(lse, temperature, upstream)
    torch.testing.assert_close(gradient, -upstream[0] * 6 / 0.7**2, rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize("which", [0, 1])
def test_one_output_alone(which):
    pairs = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        given = cast(problem(40, 50, 9), dtype)
        leaves = leaves_of(given)
        out = linear_logp(**given, backend=backend)[which]
        # Strided and expanded cotangents.
        cotangent = (
            cotangents(40, dtype)[0][:, None].expand(40, 3)[:, 1] if which else out.new_ones(()).expand(40)
        )
        pairs.append(torch.autograd.grad(out, leaves, cotangent))
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@interpreted
def test_float16():
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    half = cast(problem(70, 90, 24), torch.float16)
    ours, theirs = results(half, "triton"), results(half, "reference")
    want = results(cast(half, torch.float64), "reference")
    for one, other, exact in zip(ours, theirs, want, strict=True):
        assert one.dtype == other.dtype
        allowed = 2 * (other.double() - exact).norm() + 1e-3 * exact.norm()
        assert (one.double() - exact).norm() <= allowed


@interpreted
def test_a_sure_target_keeps_its_gradient_in_float16():
    """As in `test_linear_logp`: 1 - p = 9.08e-5, while half a unit of float16 at 1 is 2.4e-4."""
    hidden = torch.eye(2, dtype=torch.float16).requires_grad_()
    weight = torch.tensor([[10.0, 0.0], [0.0, 10.0], [0.0, 0.0]], dtype=torch.float16)
    logp = linear_logp(hidden, weight, torch.tensor([0, 1]), backend="triton").logp
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    rest = 2 / (math.exp(10) + 2)
    torch.testing.assert_close(logp, torch.full((2,), math.log1p(-rest)), rtol=1e-3, atol=0)
    expected = torch.tensor([[rest, -rest / 2], [-rest / 2, rest]]) * 10
    torch.testing.assert_close(gradient.float(), expected, rtol=4e-3, atol=0)


@interpreted
def test_lse_alone_and_rows_with_nothing_left():
    given = problem(40, 50, 9)
    given["candidate_ids"][:] = 3
    given["target_ids"][:] = torch.arange(40) % 4
    given.pop("target")
    pairs = []
    for backend, one in (("triton", cast(given, torch.float32)), ("reference", given)):
        leaves = leaves_of(one)
        lse = linear_lse(**one, backend=backend)
        assert (lse == -math.inf).sum() == 10
        found = torch.autograd.grad(lse, leaves, cotangents(40, lse.dtype)[0])
        pairs.append([lse.detach(), *found])
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "temperature"])
def test_one_gradient_alone(name):
    found = []
    for backend in ("triton", "reference"):
        given = problem(40, 50, 9, dtype=torch.float32)
        leaf = given[name].requires_grad_()
        found += gradients(linear_logp(**given, backend=backend), [leaf])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@interpreted
def test_nothing_is_written_outside(monkeypatch):
    given = problem(70, 150, 20, dtype=torch.float32)
    with harness.guarded_memory(monkeypatch) as buffers:
        results(given, "triton")
    assert len(buffers) >= 6


@interpreted
@pytest.mark.parametrize(("rows", "candidates"), [(0, 6), (3, 0)])
def test_no_rows_and_no_candidates(rows, candidates):
    hidden, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(candidates, 2, requires_grad=True)
    out = linear_logp(hidden, weight, torch.full((rows,), -100), backend="triton")
    assert out.logp.shape == (rows,) and not any(g.any() for g in gradients(out, [hidden, weight]))


@interpreted
def test_transposed_operands_and_gradients():
    weight = torch.randn(20, 50).t().requires_grad_()
    hidden = torch.randn(40, 40)[:, ::2].requires_grad_()
    target, cotangent = torch.arange(40), torch.randn(40, 2)[:, 0]
    pairs = []
    for backend in ("triton", "reference"):
        logp = linear_logp(hidden, weight, target, backend=backend).logp
        pairs.append(torch.autograd.grad(logp, (hidden, weight), cotangent))
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("most", [1, 3])
def test_the_number_of_parts_changes_nothing_but_rounding(most, monkeypatch):
    from recsys.ops.linear_logp import triton_ops

    given = problem(40, 90, 9, dtype=torch.float32)
    want = results(given, "triton")
    monkeypatch.setattr(triton_ops, "MAX_PARTS", most)
    for one, other in zip(results(given, "triton"), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("ids", [False, True])
def test_the_library_ops(ids, monkeypatch):
    """Schemas and shapes without numbers, on which a compiler relies."""
    from recsys.ops.linear_logp import launch, triton_ops

    monkeypatch.setattr(launch, "wrap_triton", WithNumbersOnly)
    monkeypatch.setattr(launch, "_launch", None)
    given = problem(40, 50, 9, dtype=torch.float32, ids=ids, bias=ids)
    given["target"].clamp_(min=-1)
    names = ("hidden", "weight", "bias", "temperature", "target", "candidate_ids", "target_ids")
    operands = [given.get(name) for name in names]
    operands[3] = operands[3].reshape(1)
    operands += [None, None]
    upstream = (*cotangents(40, torch.float32), torch.ones(40))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton_ops.forward_op, tuple(operands), test_utils=checks)
    for wanted in ([True, True, ids, True], [False, True, False, False]):
        torch.library.opcheck(triton_ops.backward_op, (*operands, *upstream, wanted), test_utils=checks)


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_wide_rows_are_refused():
    given = problem(2, 3, 4, dtype=torch.float32)
    linear_logp(**given)
    assert last_backend("linear_logp") == "reference"
    assert dict(explain("linear_logp", **given).rows)["triton"].ok
    for dtype, most in ((torch.float32, 128), (torch.float16, 512)):
        wide = problem(2, 3, most + 1, dtype=dtype)
        assert f"takes up to {most}" in dict(explain("linear_logp", **wide).rows)["triton"].reason
        assert dict(explain("linear_logp", **problem(2, 3, most, dtype=dtype)).rows)["triton"].ok


@interpreted
@pytest.mark.parametrize("stride", [20, 24])
def test_gradients_of_rows_through_their_unit_forms(stride):
    """With a row that is divided by a constant, and columns behind the last that count for nothing."""
    from recsys.ops.linear_logp import row_launch

    generator = torch.Generator().manual_seed(0)
    rows, grad = torch.randn(70, 20, generator=generator), torch.randn(70, stride, generator=generator)
    rows[3] = 1e-8
    rows.requires_grad_()
    unit = torch.nn.functional.normalize(rows, dim=1, eps=SHORTEST)
    (want,) = torch.autograd.grad(unit, rows, grad[:, :20])
    norms = norms_of(rows, rows)[0]
    got = row_launch.project(between_poison(grad), between_poison(rows.detach()), between_poison(norms))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


test_in_the_interpreter = harness.interpreter_test(__file__)
