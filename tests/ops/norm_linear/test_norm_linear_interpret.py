"""The Triton kernels behind `norm_linear` and `linear_add` on a CPU: numbers, not code generation."""

import pytest
import torch

from recsys.ops import explain, last_backend, linear_add, norm_linear
from tests.tools.interpreter import (
    INTERPRETED,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)

WIDTHS = (12, 5, 7)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a worker; memory that PyTorch hands out uninitialised holds NaN."""
    if not INTERPRETED:
        yield
        return
    from recsys.ops.norm_linear import triton_ops
    from recsys.ops.runtime import column_sums

    mend_interpreter(monkeypatch)
    for name in ("FORWARD_ENTRIES", "BACKWARD_ENTRIES"):  # columns and rows of several blocks
        monkeypatch.setattr(triton_ops, name, 128)
    monkeypatch.setattr(triton_ops, "WORKERS_PER_PROCESSOR", 1)
    monkeypatch.setattr(column_sums, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(column_sums, "COLUMNS", 16)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(rows, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    columns = sum(WIDTHS)
    shapes = ((rows, width), (width,), (width,), (columns, width), (columns,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(given, backend, **options):
    """Parts and all gradients, for random cotangents of the parts and of x."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    found = norm_linear(*leaves, WIDTHS, backend=backend, **options)
    assert last_backend("norm_linear") == backend
    generator = torch.Generator().manual_seed(1)
    outs = [*found.parts, found.x]
    cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    if backend == "triton":
        cotangents = [between_poison(one) for one in cotangents]
    return [*(part.detach() for part in found.parts), *torch.autograd.grad(outs, leaves, cotangents)]


@interpreted
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("keep_normed", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(7, 6), (150, 20), (1, 33), (0, 6), (40, 1)])
def test_parts_and_gradients(rows, width, keep_normed, silu):
    exact = inputs(rows, width)
    x, *parameters = [tensor.float() for tensor in exact]
    options = {"eps": 1e-3, "keep_normed": keep_normed, "silu": silu}
    got = results([between_poison(x), *parameters], "triton", **options)
    for one, other in zip(got, results(exact, "reference", **options), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("tokens", [torch.float16, torch.float32])
def test_float16_products(tokens):
    """At most twice as far from float64 as the reference in these types. The interpreter lacks bfloat16."""
    x, *parameters = inputs(60, 24, torch.float32)
    given, options = [x.to(tokens), *parameters], {"dtype": torch.float16}
    ours, theirs = results(given, "triton", **options), results(given, "reference", **options)
    want = results([tensor.double() for tensor in given], "reference")
    for one, other, exact in zip(ours, theirs, want, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - exact).norm() <= 2 * (other.double() - exact).norm() + 1e-6 * exact.norm()


@interpreted
def test_the_parts_lie_side_by_side_and_their_gradients_too():
    leaves = [tensor.requires_grad_() for tensor in inputs(9, 6, torch.float32)]
    found = norm_linear(*leaves, WIDTHS, backend="triton")
    places = [found.grad_buffer.place(part) for part in found.parts]
    for part, place, first in zip(found.parts, places, (0, 12, 17), strict=True):
        assert part.stride() == place.stride() == (sum(WIDTHS), 1)
        assert part.storage_offset() == place.storage_offset() == first
        place.fill_(1.0)
    got = torch.autograd.grad(found.parts, leaves[0], places)[0]
    same = norm_linear(*leaves, WIDTHS, backend="reference").parts
    want = torch.autograd.grad([part.sum() for part in same], leaves[0])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
@torch.no_grad()
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("rows", [0, 7])
def test_parts_are_made_where_they_are_to_stay(rows, silu):
    given = inputs(rows, 6, torch.float32)
    expected = norm_linear(*given, WIDTHS, silu=silu, backend="reference").parts
    place = torch.full((rows, sum(WIDTHS)), float("nan"))
    found = norm_linear(*given, WIDTHS, silu=silu, out=place, backend="triton").parts
    assert [part.data_ptr() for part in found] == [part.data_ptr() for part in place.split(WIDTHS, dim=1)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
@torch.no_grad()
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_the_sum_in_place(kind, with_bias):
    x, y, weight, bias = (torch.randn(shape) for shape in ((9, 20), (9, 5), (20, 5), (20,)))
    rest = (y.to(kind), weight, bias if with_bias else None)
    expected = linear_add(x, *rest, backend="reference")
    assert linear_add(x, *rest, in_place=True, backend="triton") is x
    torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-3)


@interpreted
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.float32, torch.float16)])
def test_the_sum(types, rows, with_bias):
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 20), (rows, 9), (20, 9), (20,))
    x, y, *rest = [torch.randn(shape, generator=generator) for shape in shapes[: 4 if with_bias else 3]]
    given = [x.to(types[0]), y.to(types[1]), *rest]
    found = []
    for backend, dtype in (("triton", None), ("reference", None), ("reference", torch.float64)):
        leaves = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in given]
        out = linear_add(*leaves, backend=backend)
        assert last_backend("linear_add") == backend
        cotangent = torch.randn(rows, 20, generator=torch.Generator().manual_seed(2)).to(out)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    for ours, theirs, exact in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        allowed = 2 * (theirs.double() - exact).norm() + 1e-6 * exact.norm()
        assert (ours.double() - exact).norm() <= allowed


@interpreted
def test_parameters_that_need_no_gradient_get_none():
    x, *parameters = inputs(9, 6, torch.float32)
    x.requires_grad_()
    norm_linear(x, *parameters, WIDTHS, backend="triton").parts[0].sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in parameters)


@interpreted
@pytest.mark.parametrize("autocast", [True, False])
def test_without_gradients_the_same_numbers_and_no_gradient_buffer(autocast):
    given = inputs(30, 20, torch.float32)
    x, y, weight, bias = given[0], torch.randn(30, 9), torch.randn(20, 9), torch.randn(20)
    dtype = torch.float16
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found = norm_linear(*given, WIDTHS, dtype=dtype, backend="triton")
        out = linear_add(x, y.to(dtype), weight, bias, backend="triton")
        with torch.no_grad():
            again = norm_linear(*given, WIDTHS, dtype=dtype, backend="triton")
            assert torch.equal(linear_add(x, y.to(dtype), weight, bias, backend="triton"), out)
    assert found.grad_buffer is not None and again.grad_buffer is None and again.x is x
    assert all(torch.equal(one, other) for one, other in zip(found.parts, again.parts, strict=True))


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_wide_rows_are_refused():
    given = inputs(2, 6, torch.float32)
    norm_linear(*given, WIDTHS)
    assert last_backend("norm_linear") == "reference"
    assert dict(explain("norm_linear", *given, WIDTHS).rows)["triton"].ok
    wide = inputs(1, 4100, torch.float32)
    assert "takes up to 4096" in dict(explain("norm_linear", *wide, WIDTHS).rows)["triton"].reason


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
