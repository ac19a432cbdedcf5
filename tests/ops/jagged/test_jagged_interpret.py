"""The Triton kernels of `gather_rows` on a CPU: where bits go, not code generation."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import explain, gather_rows, last_backend
from recsys.ops.runtime import dispatch
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)

GUARD = 777


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs, and rows in several blocks of columns."""
    if not INTERPRETED:
        return
    from recsys.ops.jagged import triton_ops

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(triton_ops, "BLOCK_BYTES", 256)
    monkeypatch.setattr(triton_ops, "LONGEST_BLOCK", 16)
    monkeypatch.setattr(triton_ops, "SHORTEST_BLOCK", 8)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@st.composite
def problems(draw):
    """Row numbers of sources, and maps as lists."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    index = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.permutations(range(sum(sizes))))
        rows = rows[: draw(st.integers(0, len(rows)))]
        for _ in range(draw(st.integers(0, 3))):
            rows.insert(draw(st.integers(0, len(rows))), -1)
        index.append(rows)
    return sizes, index


def by_lists(values, index, cotangent):
    """The output and gradients, row by row."""
    rows = torch.cat(values).double()
    zero = torch.zeros(rows.shape[1:], dtype=torch.float64)
    places = [row for own in index for row in own]
    out = torch.stack([*(rows[row] if row >= 0 else zero for row in places), zero])[:-1]
    gradient = torch.zeros_like(rows)
    for place, row in enumerate(places):
        if row >= 0:
            gradient[row] += cotangent[place].double()
    return out, gradient.split([one.shape[0] for one in values])


@interpreted
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    problem=problems(),
    width=st.sampled_from([(), (1,), (3, 2), (16,), (24,), (40,), (0,)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    narrow=st.booleans(),
    known=st.booleans(),
)
def test_rows_go_where_the_maps_say_and_gradients_come_back(problem, width, dtype, narrow, known):
    sizes, index = problem
    values = [between_poison(torch.randn(size, *width).to(dtype)).requires_grad_() for size in sizes]
    maps = [torch.tensor(own, dtype=torch.int32 if narrow else torch.int64) for own in index]
    inverse = None
    if known:
        before = [sum(map(len, index[:k])) for k in range(len(index))]
        found = [
            [own.index(row) + start if row in own else -1 for row in range(sum(sizes))]
            for own, start in zip(index, before, strict=True)
        ]
        inverse = torch.tensor(found, dtype=torch.int64).view(len(index), sum(sizes))
        inverse = inverse[0] if len(index) == 1 else inverse
    out = gather_rows(values, maps, inverse, backend="triton")
    assert last_backend("gather_rows") == "triton" and out.dtype == dtype
    cotangent = between_poison(torch.randn(out.shape).to(dtype))
    want, gradients = by_lists([one.detach() for one in values], index, cotangent)
    assert torch.equal(out.double(), want)
    for got, exact in zip(torch.autograd.grad(out, values, cotangent), gradients, strict=True):
        assert got.dtype == dtype
        # float32 sums of up to three numbers, rounded once
        torch.testing.assert_close(got, exact.to(dtype), rtol=0 if len(maps) == 1 else 1e-3, atol=0)


@interpreted
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_any_bits(dtype):
    values = torch.randint(0, 200, (20, 5)).to(dtype)
    if dtype == torch.int64:
        values[3, 2] = 2**62 + 1
    index = torch.tensor([19, -1, 3, 0])
    out = gather_rows(values, index, backend="triton")
    assert out.dtype == dtype and torch.equal(out[[0, 2, 3]], values[[19, 3, 0]]) and not out[1].any()


@interpreted
def test_a_row_that_is_none_is_zeros_and_no_memory_of_others():
    values = between_poison(torch.randn(6, 4))
    out = gather_rows([values[:2], values[2:]], torch.tensor([6, 5, -2, 2**40, 0]), backend="triton")
    assert torch.equal(out, torch.stack([torch.zeros(4), values[5], *torch.zeros(2, 4), values[0]]))


@interpreted
def test_columns_of_a_wider_tensor_and_a_transposed_gradient():
    joint = torch.randn(30, 3, 8, requires_grad=True)
    index = torch.randperm(60)
    found = []
    for backend in ("triton", "reference"):
        out = gather_rows([joint[:, 0], joint[:, 2]], index, backend=backend)
        cotangent = torch.randn(8, 60, generator=torch.Generator().manual_seed(1)).t()
        found.append([out, *torch.autograd.grad(out, joint, cotangent)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    from recsys.ops.jagged import triton_ops

    buffers, original = [], torch.Tensor.new_empty

    def guarded(tensor, *shape, **options):
        if "device" in options:  # the interpreter's own
            return original(tensor, *shape, **options)
        size = torch.Size(*shape)
        buffers.append(torch.full((size.numel() + 99,), float(GUARD)))
        return buffers[-1][: size.numel()].view(size)

    given = torch.randn(33, 20)
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    triton_ops.launch_gather([given], torch.randint(33, (50,)))
    triton_ops.launch_sum(given, torch.randint(-1, 33, (2, 41)), 41)
    assert len(buffers) == 2
    for buffer in buffers:
        assert (buffer[-99:] == GUARD).all() and not (buffer[:-99] == GUARD).any()


@interpreted
@pytest.mark.parametrize("num_maps", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_the_library_ops(num_maps, known, monkeypatch):
    """What a compiler relies on: schemas, shapes without numbers, gradients through the library."""
    from recsys.ops.jagged import triton_ops

    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    values = [torch.randn(size, 6, requires_grad=True) for size in (7, 3)]
    maps = [torch.tensor([9, 4, -1, 0]), torch.tensor([2, 9, 8])][:num_maps]
    sizes, index = [len(one) for one in maps], torch.cat(maps)
    inverse = triton_ops.invert_each(index, sizes, 10) if known else None
    arguments = (values, index, inverse, sizes)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_ops.gather_rows_triton, arguments, test_utils=checks)
    places, cotangent = triton_ops.invert_each(index, sizes, 10), torch.randn(len(index), 6)
    torch.library.opcheck(
        triton_ops.gather_rows_triton_backward,
        (cotangent, places, 10),
        test_utils=("test_schema", "test_faketensor"),
    )
    outs = (triton_ops.gather_rows_triton(*arguments), gather_rows(values, maps, backend="triton"))
    got, want = (torch.autograd.grad(out, values, cotangent) for out in outs)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_what_is_refused():
    values, index = torch.randn(4, 2), torch.tensor([1])
    gather_rows(values, index)
    assert last_backend("gather_rows") == "reference"
    assert dict(explain("gather_rows", values, index).rows)["triton"].ok
    assert (
        "has 16 bytes"
        in dict(explain("gather_rows", values.to(torch.complex128), index).rows)["triton"].reason
    )
    rows = dict(explain("gather_rows", values.double(), [index, index]).rows)
    assert "not torch.float64" in rows["triton"].reason


@interpreted
def test_on_a_gpu_auto_takes_it_but_in_an_exported_graph():
    op, fields = dispatch._OPS["gather_rows"], {"device": "cuda", "dtype": torch.float32, "num_maps": 2}
    for exported in (False, True):
        facts = type(op.facts(torch.zeros(2), torch.tensor([0])))(**fields, exported=exported)
        assert op.select(facts).__name__.endswith("reference" if exported else "triton")
        assert op.select(facts, "triton").__name__.endswith("triton")


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
