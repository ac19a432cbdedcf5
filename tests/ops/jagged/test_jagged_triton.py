"""The Triton kernels of `gather_rows`: where bits go in the interpreter, all sizes and graphs on a GPU."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import explain, gather_rows, last_backend
from recsys.ops.runtime import dispatch
from tests.ops import harness
from tests.ops.harness import runners
from tests.tools.interpreter import WithNumbersOnly, between_poison, interpreted

DEVICE = "cuda"
everywhere = pytest.mark.parametrize("runner", runners("triton"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs, and rows in several blocks of columns."""
    from recsys.ops.jagged import triton_ops

    harness.shrink(monkeypatch, triton_ops, BLOCK_BYTES=256, LONGEST_BLOCK=16, SHORTEST_BLOCK=8)


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


@everywhere
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_any_bits(dtype, runner):
    values = torch.randint(0, 200, (20, 5)).to(runner.device, dtype)
    if dtype == torch.int64:
        values[3, 2] = 2**62 + 1
    index = torch.tensor([19, -1, 3, 0], device=runner.device)
    out = gather_rows(values, index, backend="triton")
    assert out.dtype == dtype and torch.equal(out[[0, 2, 3]], values[[19, 3, 0]]) and not out[1].any()


@everywhere
def test_a_row_that_is_none_is_zeros_and_no_memory_of_others(runner):
    values = between_poison(torch.randn(6, 4)).to(runner.device)
    index = torch.tensor([6, 5, -2, 2**40, 0], device=runner.device)
    out = gather_rows([values[:2], values[2:]], index, backend="triton")
    zeros = torch.zeros(4, device=runner.device)
    assert torch.equal(out, torch.stack([zeros, values[5], zeros, zeros, values[0]]))


@everywhere
def test_columns_of_a_wider_tensor_and_a_transposed_gradient(runner):
    joint = torch.randn(30, 3, 8, device=runner.device, requires_grad=True)
    index = torch.randperm(60, device=runner.device)
    found = []
    for backend in ("triton", "reference"):
        out = gather_rows([joint[:, 0], joint[:, 2]], index, backend=backend)
        cotangent = torch.randn(8, 60, generator=torch.Generator().manual_seed(1)).t().to(runner.device)
        found.append([out, *torch.autograd.grad(out, joint, cotangent)])
    harness.assert_equal(*found)


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    from recsys.ops.jagged import triton_ops

    given = torch.randn(33, 20)
    index, places = torch.randint(33, (50,)), torch.randint(-1, 33, (2, 41))
    with harness.guarded_memory(monkeypatch) as buffers:
        triton_ops.launch_gather([given], index)
        triton_ops.launch_sum(given, places, 41)
    assert len(buffers) == 2


@interpreted
@pytest.mark.parametrize("num_maps", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_the_library_ops(num_maps, known, monkeypatch):
    """Schemas, shapes without numbers and gradients through the library: a compiler relies on them."""
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
    harness.assert_equal(got, want)


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


test_the_kernels_in_the_interpreter = harness.interpreter_test(__file__)


def problem_on_gpu(sizes, lengths, width, dtype, seed=0):
    """Sources with these numbers of rows, and maps of these lengths: no row twice, some places empty."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    values = [torch.randn(size, *width, generator=generator).mul(100).to(dtype).to(DEVICE) for size in sizes]
    index = []
    for length in lengths:
        rows = torch.randperm(total, generator=generator)[:length]
        rows = torch.cat([rows, rows.new_full((length - len(rows),), -1)])
        rows[torch.rand(length, generator=generator) < 0.1] = -1
        index.append(rows[torch.randperm(length, generator=generator)].to(DEVICE))
    return values, index


def results(values, index, backend, inverse=None):
    """The output, and gradients of all sources for random cotangents."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in values]
    out = gather_rows(leaves, index, inverse, backend=backend)
    assert last_backend("gather_rows") == backend
    if not out.is_floating_point():
        return [out]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_equal(values, index):
    harness.assert_equal(*(results(values, index, backend) for backend in ("triton", "reference")))


# Few artefacts: one for each width and size of a number, times the number of sources.
WIDTHS = [((256,), torch.float32), ((4, 25), torch.bfloat16), ((), torch.int64)]


@pytest.mark.gpu
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_maps(data):
    width, dtype = data.draw(st.sampled_from(WIDTHS))
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=3))
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=2))
    assert_equal(*problem_on_gpu(sizes, lengths, width, dtype, data.draw(st.integers(0, 9))))


@pytest.mark.gpu
def test_views_odd_addresses_and_transposed_gradients():
    joint = torch.randn(501, 3 * 256 + 1, device=DEVICE).bfloat16().requires_grad_()
    index = torch.randperm(500, device=DEVICE)
    found = []
    for backend in ("triton", "reference"):
        _, a, b = joint[1:].split([1, 256, 512], dim=1)
        out = gather_rows([a, b[:, :256]], torch.cat([index, index + 500]), backend=backend)
        cotangent = torch.randn(256, 1000, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
        found.append([out.detach(), *torch.autograd.grad(out, joint, cotangent.t())])
    harness.assert_equal(*found)


@pytest.mark.gpu
def test_rows_past_two_to_the_thirty_one_numbers():
    values = torch.empty(2**23 + 3, 512, dtype=torch.int8, device=DEVICE)
    values[-1], values[0] = 7, 5
    out = gather_rows(values, torch.tensor([2**23 + 2, -1, 0], device=DEVICE), backend="triton")
    assert out[:, ::511].tolist() == [[7, 7], [0, 0], [5, 5]]


@pytest.mark.gpu
def test_the_same_bits_each_time_for_all_sizes_and_one_artefact():
    from recsys.ops.jagged.triton_ops import gather_kernel, sum_kernel

    batches = [
        problem_on_gpu([rows, 3, rows], [rows] * 2, (256,), torch.float32)
        for rows in (1, 16, 512, 2048, 4097)
    ]
    expected = [results(*batch, "triton") for batch in batches]
    kernels = (gather_kernel, sum_kernel)
    before = harness.artefacts(*kernels)
    rapid = [(i, results(*batches[i], "triton")) for n in range(40) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, got in rapid:
        harness.assert_equal(got, expected[i])
    assert harness.artefacts(*kernels) == before


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    values, index = problem_on_gpu([300, 200], [400, 500], (256,), torch.float32)
    results(values, index, "triton")
    with harness.no_waiting():
        leaves = [one.requires_grad_() for one in values]
        gather_rows(leaves, index, backend="triton").sum().backward()


@pytest.mark.gpu
def test_a_compiled_graph_serves_all_sizes():
    def moved(first, second, index, other):
        return 2 * gather_rows([first * 3, second], [index, other], backend="triton")

    compiled = torch.compile(moved, dynamic=True, fullgraph=True)
    for rows in (50, 9, 3000):
        values, index = problem_on_gpu([rows, rows + 4], [rows + 2, rows + 3], (256,), torch.float32)
        leaves = [one.requires_grad_() for one in values]
        got, want = compiled(*leaves, *index), moved(*leaves, *index)
        assert torch.equal(got, want)
        cotangent = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(out, leaves, cotangent) for out in (got, want)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_the_library_op_on_a_gpu():
    from recsys.ops.jagged.triton_ops import gather_rows_triton

    values, index = problem_on_gpu([30, 20], [40], (256,), torch.float32)
    leaves = [one.requires_grad_() for one in values]
    torch.library.opcheck(gather_rows_triton, (leaves, index[0], None, [40]))
