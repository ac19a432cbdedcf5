"""The Triton kernels of `gated_norm` on a CPU: numbers, not code generation."""

import pytest
import torch

from recsys.ops import explain, gated_norm, last_backend
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)

SEED = torch.tensor([-123_456_789_012_345_678])
GUARD = 777.0

# (rows, width, groups): within a block, over several blocks and workers, one row, one column a group.
SHAPES = [(7, 6, 1), (300, 20, 2), (1, 33, 1), (70, 3, 3), (5, 130, 1)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a worker."""
    if not INTERPRETED:
        return
    from recsys.ops.gated_norm import triton_ops

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(triton_ops, "ENTRIES", 256)
    monkeypatch.setattr(triton_ops, "WORKERS_PER_PROCESSOR", 1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(rows, width):
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (rows, width), (width,), (width,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def results(given, backend, **options):
    """The output and all gradients, for random cotangents."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = gated_norm(*leaves, backend=backend, **options)
    assert last_backend("gated_norm") == backend
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    if backend == "triton":
        cotangent = between_poison(cotangent)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@interpreted
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("gate", ["ugn", "concat"])
@pytest.mark.parametrize(("rows", "width", "groups"), SHAPES)
def test_output_and_gradients(rows, width, groups, gate, dropout):
    options = {"num_groups": groups, "eps": 1e-3, "gate": gate, "dropout": dropout, "seed": SEED}
    exact = inputs(rows, width)
    got = results([between_poison(tensor.float()) for tensor in exact], "triton", **options)
    want = results(exact, "reference", **options)
    assert torch.equal(got[0] == 0, want[0] == 0)  # the same entries are dropped
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("gate", ["ugn", "concat"])
def test_float16_with_float32_parameters(gate):
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    a, u, weight, bias = inputs(60, 24)
    half = [a.half(), u.half(), weight.float(), bias.float()]
    options = {"gate": gate, "num_groups": 2, "dropout": 0.2, "seed": SEED}
    ours, theirs = results(half, "triton", **options), results(half, "reference", **options)
    want = results([tensor.double() for tensor in half], "reference", **options)
    for one, other, exact in zip(ours, theirs, want, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - exact).norm() <= 2 * (other.double() - exact).norm() + 1e-6 * exact.norm()


@interpreted
def test_views_of_one_projection_and_a_transposed_gradient():
    joint = torch.randn(50, 36, requires_grad=True)
    weight, bias = torch.randn(12), torch.randn(12)
    gradients = []
    for backend in ("triton", "reference"):
        a, u, _ = joint.split(12, dim=1)
        out = gated_norm(a, u, weight, bias, gate="ugn", backend=backend)
        cotangent = torch.randn(12, 50, generator=torch.Generator().manual_seed(1)).t()
        gradients.append(torch.autograd.grad(out, joint, cotangent)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    buffers = []

    def guarded(shape, dtype=None):
        size = torch.Size(shape)
        buffers.append(torch.full((size.numel() + 999,), GUARD, dtype=dtype))
        return buffers[-1][: size.numel()].view(size)

    monkeypatch.setattr(torch, "empty_like", lambda like, **_: guarded(like.shape, like.dtype))
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype=None, device=None: guarded(shape, dtype))
    results([tensor.float() for tensor in inputs(33, 20)], "triton", num_groups=2)
    assert len(buffers) == 5
    for buffer in buffers:
        assert (buffer[-999:] == GUARD).all() and not (buffer[:-999] == GUARD).any()


@interpreted
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_batch_without_rows(dropout):
    got = results([tensor.float() for tensor in inputs(0, 6)], "triton", num_groups=2, dropout=dropout)
    assert got[0].shape == (0, 18) and not any(gradient.any() for gradient in got[1:])


@interpreted
@pytest.mark.parametrize("rows", [0, 40])
def test_the_library_ops(rows, monkeypatch):
    """What a compiler relies on: schemas, shapes without numbers, gradients through the library."""
    from recsys.ops.gated_norm import triton_ops

    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    given = [tensor.float().requires_grad_() for tensor in inputs(rows, 12)]
    for seed, dropout in ((None, 0.0), (SEED, 0.4)):
        arguments = (*given, seed, 2, 1e-6, True, dropout)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(triton_ops.gated_norm_triton, arguments, test_utils=checks)
        cotangent = torch.randn(rows, 36)
        torch.library.opcheck(
            triton_ops.gated_norm_triton_backward,
            (cotangent, *(tensor.detach() for tensor in given), *arguments[4:]),
            test_utils=("test_schema", "test_faketensor"),
        )
        options = {"num_groups": 2, "dropout": dropout, "seed": seed, "backend": "triton"}
        outs = (triton_ops.gated_norm_triton(*arguments), gated_norm(*given, **options))
        got, want = (torch.autograd.grad(out, given, cotangent) for out in outs)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_wide_groups_are_refused():
    given = [tensor.float() for tensor in inputs(2, 6)]
    gated_norm(*given)
    assert last_backend("gated_norm") == "reference"
    assert dict(explain("gated_norm", *given).rows)["triton"].ok
    wide = [tensor.float() for tensor in inputs(1, 4098)]
    assert "takes up to 4096" in dict(explain("gated_norm", *wide).rows)["triton"].reason
    assert dict(explain("gated_norm", *wide, num_groups=2).rows)["triton"].ok


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
