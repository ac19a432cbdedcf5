"""The logic of the Hopper kernels of `linear_logp` on a CPU, by `tests/tools/gluon_emulator.py`."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.linear_logp import hopper as hopper_ops
from recsys.ops.linear_logp import launch, norms_of, reference
from recsys.ops.linear_logp import triton as triton_ops
from recsys.ops.linear_logp.recompute import Operands, OutputGrads, RequestedGrads, RowSums, projected
from tests.tools.gluon_emulator import Emulated


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Emulates the Hopper kernels; PyTorch does the work of Triton's, such as gradients of narrow rows."""
    for kernel in ("forward_kernel", "gradient_kernel", "score_grads_kernel"):
        monkeypatch.setattr(hopper_ops, kernel, Emulated(getattr(hopper_ops, kernel)))
    monkeypatch.setattr(hopper_ops, "num_processors", lambda device: 3)

    def row_sums_of(operands, maxima, totals):
        best = maxima.amax(0)
        return RowSums(best, (totals * (maxima - best).exp()).sum(0), best)

    def project(grad, rows, norms):
        return projected(grad[:, : rows.shape[1]].float(), rows.float(), norms).to(grad.dtype)

    monkeypatch.setattr(triton_ops, "launch_backward", reference.backward)
    monkeypatch.setattr(launch, "row_sums_of", row_sums_of)
    monkeypatch.setattr(launch, "project", project)
    mm = torch.mm

    def product(left, right, out_dtype=None, **rest):
        """PyTorch has `out_dtype` on CUDA only."""
        return mm(left.to(out_dtype or left.dtype), right.to(out_dtype or right.dtype), **rest)

    monkeypatch.setattr(torch, "mm", product)


def problem(rows, candidates, width, *, targets=True, normalized=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (rows, candidates))
    target = None
    if targets:
        target = torch.randint(candidates, (rows,), generator=generator)
        target[::5] = -7
        target[1::7], target[2::7] = 0, candidates - 1
    norms = norms_of(hidden, weight) if normalized else (None, None)
    operands = Operands(hidden, weight, None, torch.tensor([0.3]), target, None, None, *norms)
    parts = reference.forward(operands)
    factor = torch.randn(rows, generator=generator) / parts.total
    factor[0] = 0
    upstream = OutputGrads(parts.maximum, factor, torch.randn(rows, generator=generator))
    return operands, parts, upstream


SHAPES = [
    (130, 300, 64),
    (70, 1000, 128),
    (5, 33, 128),
    (300, 130, 72),
    (64, 128, 100),
    (1, 1, 8),
    (1, 1, 65),
    (257, 40, 256),
    (130, 70, 50),
]


@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_gradients(shape, targets):
    compare(*problem(*shape, targets=targets), exactly=True)


@pytest.mark.parametrize("shape", [(130, 300, 72), (70, 100, 50), (33, 70, 264)])
def test_rows_of_unit_length(shape):
    compare(*problem(*shape, normalized=True), exactly=False)


def compare(operands, parts, upstream, *, exactly):
    """Against the reference; not `exactly` where rows have been rounded once more."""
    got = hopper_ops.forward(operands)
    if exactly:
        torch.testing.assert_close(got.maximum, parts.maximum, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.total, parts.total, rtol=1e-4, atol=1e-5)
    ours, theirs = (sums.maximum + sums.total.log() for sums in (got, parts))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)
    wanted = RequestedGrads(True, True, False, True)
    ours, theirs = (way.backward(operands, upstream, wanted) for way in (hopper_ops, reference))
    for name in ("hidden", "weight", "scale"):
        grad, want = (getattr(grads, name).float() for grads in (ours, theirs))
        # One rounding to bfloat16 of each dz, and of the gradient of the weight.
        assert (grad - want).norm() <= 6e-3 * want.norm() + 1e-6, name


@pytest.mark.parametrize(("others", "stages", "strips"), [(64, 2, 2), (128, 3, 2), (128, 2, 4)])
def test_other_sizes(others, stages, strips, monkeypatch):
    sizes = hopper_ops.KernelSizes(others, stages, strips, 120)
    monkeypatch.setitem(hopper_ops.FORWARD, 128, sizes)
    monkeypatch.setitem(hopper_ops.GRADIENTS, 128, sizes._replace(strips=2))
    test_sums_and_gradients((300, 700, 72), True)


@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("shape", [(130, 1300, 320), (70, 200, 264), (1, 1, 512)])
def test_wide_rows_in_sections(shape, targets, monkeypatch):
    monkeypatch.setattr(hopper_ops, "SECTION_NUMBERS", 1 << 16)
    test_sums_and_gradients(shape, targets)


@pytest.mark.parametrize(("candidates", "wanted"), [(130, (True, False)), (256, (False, True))])
def test_rows_past_the_last_are_of_no_account(candidates, wanted):
    """With scores far below 0 the weights of rows of zeros overflow."""
    operands, _, _ = problem(70, candidates, 72)
    row = operands.weight[:1]
    operands = operands._replace(hidden=-9 * row.expand(70, 72), weight=row.expand(candidates, 72))
    parts = reference.forward(operands)
    assert (parts.maximum < -100).all()
    upstream = OutputGrads(parts.maximum, 1 / parts.total, torch.ones(70))
    ours, theirs = (
        way.backward(operands, upstream, RequestedGrads(*wanted, False, False))
        for way in (hopper_ops, reference)
    )
    for got, want in zip(ours, theirs, strict=True):
        if want is not None:
            assert got.isfinite().all() and (got - want).float().norm() <= 6e-3 * want.float().norm()
