"""`gather_rows` on every backend against loops over Python lists, and `segment_sum`."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.fx.experimental import _config as fx_config

from recsys.ops import gather_rows, segment_sum
from recsys.ops.jagged import GatherFacts
from recsys.ops.runtime import dispatch
from tests.ops import harness
from tests.ops.harness import REFERENCE, Case, OpTests, Problem, Runner, assert_is, normal, results, runners
from tests.tools.interpreter import between_poison, interpreted

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
by_kernels = pytest.mark.parametrize("runner", runners("triton"))


SMALL = {"jagged.triton": {"BLOCK_BYTES": 256, "LONGEST_BLOCK": 16, "SHORTEST_BLOCK": 8}}
"""Several programs, and rows in several blocks of columns, in the interpreter."""


def gathered(index, backend, inverse=None, **sources):
    return gather_rows(list(sources.values()), index, inverse, backend=backend)


def by_lists(index, inverse=None, **sources):
    """Row by row; a row of zeros stands for none, also beyond the last."""
    joined = torch.cat([*sources.values(), torch.zeros_like(next(iter(sources.values())).sum(0))[None]])
    places = [place for rows in index for place in rows.tolist()]
    return joined[torch.tensor([place if place >= 0 else len(joined) - 1 for place in places], dtype=int)]


def inverse_by_lists(index, num_rows) -> torch.Tensor:
    """The place of each row in each map, or -1."""
    places, before = [], 0
    for rows in (rows.tolist() for rows in index):
        places.append([rows.index(row) + before if row in rows else -1 for row in range(num_rows)])
        before += len(rows)
    inverse = torch.tensor(places, dtype=torch.int64).view(len(index), num_rows)
    return inverse[0] if len(index) == 1 else inverse


def problem(sizes, lengths, width, dtype=torch.float64, *, seed=0, ids=torch.int64, known=False) -> Problem:
    """Sources with these numbers of rows, and maps of these lengths: no row twice, some places empty.

    `known`: the inverse is given.
    """
    generator, total, index = torch.Generator().manual_seed(seed), sum(sizes), []
    for length in lengths:
        rows = torch.randperm(total, generator=generator)[:length]
        rows = torch.cat([rows, rows.new_full((length - len(rows),), -1)])
        rows[torch.rand(length, generator=generator) < 0.1] = -1
        index.append(rows[torch.randperm(length, generator=generator)].to(ids))
    sources = {f"values_{n}": normal(size, *width, seed=n) for n, size in enumerate(sizes)}
    options = {"index": index} | ({"inverse": inverse_by_lists(index, total)} if known else {})
    return Problem("gather_rows", gathered, sources, options).cast(dtype)


def check(given: Problem, runner: Runner, view=None) -> None:
    """The reference is the loops in float64; kernels have its bits: sums over maps are rounded once."""
    if runner == REFERENCE:
        assert_is(given, by_lists, close=1e-14)
    else:
        harness.assert_equal([made.cpu() for made in results(given, runner, view)], results(given, REFERENCE))


@everywhere
@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    width=st.sampled_from([(), (1,), (3, 2), (16,), (24,), (40,), (0,)]),
    types=st.tuples(*map(st.sampled_from, ([torch.float32, torch.float16], [torch.int32, torch.int64]))),
    known=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_go_where_the_maps_say_and_gradients_come_back(
    sizes, lengths, width, types, known, seed, runner
):
    if runner.device == "cuda":  # few artefacts: one for each width and size of a number, and sources
        sizes, lengths, width = [99 * size for size in sizes[:3]], [99 * n for n in lengths], (256,)
    dtype, ids = types
    check(problem(sizes, lengths, width, dtype, seed=seed, ids=ids, known=known), runner)


def test_sums_of_gradients_are_rounded_once():
    values = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    out = gather_rows(values, [torch.tensor([0])] * 3)
    cotangent = torch.tensor([1.0, 2.0**-8, 2.0**-8], dtype=torch.bfloat16)  # 1 + 2^-8 alone rounds to 1
    assert torch.autograd.grad(out, values, cotangent)[0].item() == 1 + 2.0**-7


@everywhere
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_any_bits(dtype, runner):
    values = torch.randint(0, 200, (20, 5)).to(runner.device, dtype)
    if dtype == torch.int64:
        values[3, 2] = 2**62 + 1
    index = torch.tensor([19, -1, 3, 0], device=runner.device)
    out = gather_rows(values, index, backend=runner.backend)
    assert out.dtype == dtype and torch.equal(out[[0, 2, 3]], values[[19, 3, 0]]) and not out[1].any()


def test_nan_stays_where_it_is():
    values = torch.tensor([[float("nan")], [1.0]])
    assert gather_rows(values, torch.tensor([1, -1])).tolist() == [[1.0], [0.0]]


def test_a_row_named_twice_is_an_error_and_no_lost_gradient():
    values = torch.randn(3, 2, requires_grad=True)
    out = gather_rows(values, torch.tensor([0, 2, 0, -1, -1]))
    with pytest.raises(ValueError, match="index names 1 rows more than once"):
        out.sum().backward()


@by_kernels
def test_a_row_that_is_none_is_zeros_and_no_memory_of_others(runner):
    values = between_poison(torch.randn(6, 4)).to(runner.device)
    index = torch.tensor([6, 5, -2, 2**40, 0], device=runner.device)
    out = gather_rows([values[:2], values[2:]], index, backend="triton")
    zeros = torch.zeros(4, device=runner.device)
    assert torch.equal(out, torch.stack([zeros, values[5], zeros, zeros, values[0]]))


def library(device):
    from recsys.ops.jagged import triton as triton_ops

    for num_maps, known in ((1, False), (1, True), (2, False), (2, True)):
        values = [torch.randn(size, 6, device=device, requires_grad=True) for size in (7, 3)]
        maps = [torch.tensor(rows, device=device) for rows in ([9, 4, -1, 0], [2, 9, 8])][:num_maps]
        sizes, index = [len(rows) for rows in maps], torch.cat(maps)
        places, cotangent = (
            triton_ops.invert_each(index, sizes, 10),
            torch.randn(len(index), 6, device=device),
        )
        arguments = (values, index, places if known else None, sizes)
        yield triton_ops.gather_rows_triton, arguments, True
        yield triton_ops.gather_rows_triton_backward, (cotangent, places, 10), False
        outs = (triton_ops.gather_rows_triton(*arguments), gather_rows(values, maps, backend="triton"))
        harness.assert_equal(*(torch.autograd.grad(out, values, cotangent) for out in outs))


TESTS = OpTests(
    compare=check,
    strided=Case(problem, [33, 8], [50, 41], (20,), torch.float32),
    guarded=Case(problem, [33], [50, 41], (20,), torch.float32),
    library=library,
    wrapped=["jagged.triton"],
)


@interpreted
def test_on_a_gpu_auto_takes_it_but_in_an_exported_graph():
    op, fields = dispatch._OPS["gather_rows"], {"device": "cuda", "dtype": torch.float32, "num_maps": 2}
    for exported in (False, True):
        facts = GatherFacts(**fields, exported=exported)
        assert op.select(facts).__name__.endswith("reference" if exported else "triton")
        assert op.select(facts, "triton").__name__.endswith("triton")


@by_kernels
def test_views_at_odd_addresses(runner):
    rows = 60 if runner.is_interpreted else 500
    joint = torch.randn(rows + 1, 3 * 256 + 1, device=runner.device).to(runner.half).requires_grad_()
    index = torch.randperm(rows, device=runner.device)
    pairs = []
    for backend in ("triton", "reference"):
        _, a, b = joint[1:].split([1, 256, 512], dim=1)
        out = gather_rows([a, b[:, :256]], torch.cat([index, index + rows]), backend=backend)
        cotangent = torch.randn(256, 2 * rows, generator=torch.Generator().manual_seed(1)).to(out)
        pairs.append([out.detach(), *torch.autograd.grad(out, joint, cotangent.t())])
    harness.assert_equal(*pairs)


def test_blocks_hold_whole_rows_or_equal_parts_of_them():
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
    from recsys.ops.jagged.triton import blocks_of, step_of

    for width in range(1, 3000):
        columns = blocks_of(width, 4).columns
        assert columns & (columns - 1) == 0 and columns <= 1024
        covered = -(-width // columns) * columns
        assert covered == width or columns == min(1024, 1 << (width - 1).bit_length())
    assert [step_of(strides) for strides in ([256], [24, 256], [100, 16], [3], [0])] == [16, 8, 4, 1, 16]


test_in_the_interpreter = harness.interpreter_test(__file__)


@pytest.mark.gpu
def test_rows_past_two_to_the_thirty_one_numbers():
    values = torch.empty(2**23 + 3, 512, dtype=torch.int8, device="cuda")
    values[-1], values[0] = 7, 5
    out = gather_rows(values, torch.tensor([2**23 + 2, -1, 0], device="cuda"), backend="triton")
    assert out[:, ::511].tolist() == [[7, 7], [0, 0], [5, 5]]


@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 0], [0, 0], [], [5], [1, 1, 1]])
def test_segments_add_up_and_empty_ones_are_zero(lengths, lengths_dtype):
    values = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    pooled = segment_sum(values, torch.tensor(lengths, dtype=lengths_dtype))
    assert pooled.shape == (len(lengths), 2)
    start = 0
    for row, length in zip(pooled.tolist(), lengths, strict=True):
        expected = [sum(values[start + n, e].item() for n in range(length)) for e in range(2)]
        assert row == pytest.approx(expected, abs=1e-12)
        start += length
    if values.numel():
        assert torch.autograd.gradcheck(lambda v: segment_sum(v, torch.tensor(lengths)), values)


def arguments(**changes):
    return {"values": torch.zeros(2), "index": torch.tensor([1])} | changes


def segments(**changes):
    return {"values": torch.zeros(3, 1), "lengths": torch.tensor([3])} | changes


ONE, TWO, META = torch.tensor([1]), torch.zeros(2), torch.zeros(2, device="meta")
OTHER_SHAPES = r"first size only, values\[1\] has shape \(2, 4\) of torch.float32, the first one \(2, 3\)"
ONE_DIMENSION = r"inverse must have two dimensions, got shape \(2,\)"
WRONG = [
    ({"index": TWO}, TypeError, "index must be int64 or int32, got torch.float32"),
    ({"index": ONE[None]}, ValueError, r"index must have one dimension, got shape \(1, 1\)"),
    ({"values": torch.zeros(())}, ValueError, "values must have at least one dimension"),
    ({"values": META}, ValueError, "index is on cpu, values on meta"),
    ({"values": [torch.zeros(2, 3), torch.zeros(2, 4)]}, ValueError, OTHER_SHAPES),
    ({"values": [TWO, TWO.double()]}, ValueError, r"values\[1\] has shape \(2,\) of torch.float64"),
    ({"values": []}, ValueError, "values must be a tensor or some of them"),
    ({"index": [ONE, TWO]}, TypeError, r"index\[1\] must be int64 or int32, got torch.float32"),
    (
        {"inverse": ONE},
        ValueError,
        r"inverse must have shape \[2\], a place for each row of values, got \(1,\)",
    ),
    ({"index": [ONE] * 2, "inverse": torch.tensor([-1, 0])}, ValueError, ONE_DIMENSION),
]
WRONG_SEGMENTS = [
    ({"lengths": torch.tensor([1, 1])}, ValueError, "lengths add up to 2, but values has 3 rows"),
    ({"lengths": TWO}, TypeError, "lengths must be int32 or int64"),
    ({"values": torch.zeros(3, dtype=torch.int64)}, TypeError, "values must be floating point rows"),
]

test_wrong_arguments_are_named = harness.refused(gather_rows, arguments, WRONG)
test_wrong_segments_are_named = harness.refused(segment_sum, segments, WRONG_SEGMENTS)


class Gathering(nn.Module):
    def __init__(self, complete):
        super().__init__()
        self.complete = complete

    def forward(self, values, index):
        return gather_rows(values, index, complete=self.complete)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_exported_graph_reads_no_row_that_does_not_exist(complete, dtype):
    """PyTorch runs parts of a graph on made-up numbers when it compiles a package for a GPU."""
    values, index = torch.randn(5, 3), torch.tensor([4, 0, 3], dtype=dtype)
    dims = {0: Dim("rows", min=0)}, {0: Dim("places", min=0)}
    with fx_config.patch(backed_size_oblivious=True):
        graph = torch.export.export(Gathering(complete), (values, index), dynamic_shapes=dims).module()
    assert torch.equal(graph(values, index), torch.stack([values[4], values[0], values[3]]))
    assert graph(values[:0], index[:0]).shape == (0, 3)
    largest = torch.iinfo(dtype).max
    made_up = torch.tensor([5, 6, largest, -2, -largest - 1, 1], dtype=dtype)
    rows = torch.cat([values, torch.zeros(1, 3)])
    assert all((rows == row).all(1).any() for row in graph(values, made_up))
    assert torch.equal(graph(values, made_up)[5], values[1])
    if not complete:
        assert not graph(values, torch.tensor([-1], dtype=dtype)).any()
