"""The Triton kernels of `segment_sum` on a CPU: numbers, not code generation."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import last_backend, segment_sum
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Segments of several pieces, pieces of several blocks, rows in several blocks of columns."""
    if not INTERPRETED:
        return
    from recsys.ops.segment_sum import triton_ops

    mend_interpreter(monkeypatch)
    small = {"ENTRIES": 32, "LONGEST_BLOCK": 8, "SHARE_COLUMNS": 4, "SHORT_PIECE": 8, "PIECES": 4}
    for name, number in small.items():
        monkeypatch.setattr(triton_ops, name, number)
    monkeypatch.setattr(triton_ops, "SMALLEST_PIECE", 8)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_lists(values, lengths):
    """Sums in float64, segment by segment."""
    parts = values.double().split(list(lengths))
    zero = torch.zeros(values.shape[1:], dtype=torch.float64)
    return torch.stack([*(sum(part.unbind(), zero) for part in parts), zero])[:-1]


@interpreted
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 8, 9, 16, 40, 100]), max_size=12),
    width=st.sampled_from([(), (1,), (3, 2), (8,), (20,)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    narrow=st.booleans(),
)
def test_sums_and_gradients(lengths, width, dtype, narrow):
    values = between_poison(torch.randn(sum(lengths), *width).to(dtype)).requires_grad_()
    counts = torch.tensor(lengths, dtype=torch.int32 if narrow else torch.int64)
    out = segment_sum(values, counts, backend="triton")
    assert last_backend("segment_sum") == "triton" and out.dtype == dtype
    unit = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), by_lists(values.detach(), lengths), rtol=unit, atol=1e-5)
    cotangent = between_poison(torch.randn(out.shape).to(dtype))
    (gradient,) = torch.autograd.grad(out, values, cotangent)
    assert torch.equal(gradient, cotangent.repeat_interleave(counts, 0))


@interpreted
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("piece", [8, 16])
def test_however_rows_are_cut(piece, together, monkeypatch):
    """Starts and ends on, before and behind the ends of pieces."""
    from recsys.ops.segment_sum import triton_ops

    monkeypatch.setattr(triton_ops, "cuts_of", lambda *_, **__: triton_ops.Cuts(piece, together))
    for lengths in ([8, 8, 16], [7, 1, 9, 15], [33], [1] * 40, [0, 31, 0, 1, 0], [16, 0, 0, 17], [0, 0]):
        values = torch.randn(sum(lengths), 5)
        out = segment_sum(values, torch.tensor(lengths), backend="triton")
        torch.testing.assert_close(out.double(), by_lists(values, lengths), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("lengths", [[3, 0, 4], [0, 0], [50]])
def test_the_library_ops(lengths, monkeypatch):
    """What a compiler relies on: schemas, shapes without numbers, gradients through the library."""
    from recsys.ops.segment_sum import triton_ops

    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    values = torch.randn(sum(lengths), 6, requires_grad=True)
    counts = torch.tensor(lengths)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_ops.segment_sum_triton, (values, counts), test_utils=checks)
    cotangent = torch.randn(len(lengths), 6)
    torch.library.opcheck(
        triton_ops.segment_sum_triton_backward,
        (cotangent, counts, sum(lengths)),
        test_utils=("test_schema", "test_faketensor"),
    )
    outs = (triton_ops.segment_sum_triton(values, counts), segment_sum(values, counts, backend="triton"))
    assert torch.equal(*(torch.autograd.grad(out, values, cotangent)[0] for out in outs))


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
