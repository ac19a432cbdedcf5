"""Exact top-k by every backend against sorting every score in plain Python, or in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.ops import explain, last_backend, top_k
from recsys.ops.top_k import reference
from tests.ops import harness
from tests.ops.harness import REFERENCE, Runner, runners
from tests.ops.top_k.problems import (
    Problem,
    around_centres,
    assert_best,
    brute_force,
    exact_scores,
    found_by,
    whole_numbers,
)
from tests.tools.interpreter import INTERPRETED, interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities

NONE = torch.zeros(0, dtype=torch.int64)
INTERPRETER, ON_GPU = Runner("triton", "cpu"), Runner("triton", "cuda")

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
by_kernels = pytest.mark.parametrize("runner", runners("triton"))


def small_blocks(table):
    return {width: blocks._replace(queries=16, group=16) for width, blocks in table.items()}


FEW = {"CLASSES": 8, "PART": 2, "REMOVED": 8, "STEP": 64, "CHUNK_QUERIES": 20, "CHUNK_BYTES": 20 * 4 * 10}
SMALL = {"top_k.triton": FEW | {"BLOCKS": small_blocks}}
"""In the interpreter several groups, parts of groups, classes, chunks of queries and of items."""


def assert_sorted(problem: Problem, k: int, runner: Runner, dtype: torch.dtype) -> None:
    """Scores and items are those of sorting, ties and all; the numbers must be exact in any type."""
    answer = found_by(problem.placed(runner, dtype), k, runner)
    scores, items = brute_force(problem, k)
    assert answer.items.tolist() == items
    assert answer.scores.tolist() == scores


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 40),
    st.one_of(st.integers(1, 3), st.integers(1, 30)),
    st.sampled_from([1, 4, 7, 64]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 10_000),
)
def test_the_reference_sorts_with_ties_and_removals(num_queries, num_items, k, block, group, dtype, seed):
    with mock.patch.multiple(reference, GROUP=group, BLOCK=block):
        assert_sorted(whole_numbers(num_queries, num_items, 3, seed), k, REFERENCE, dtype)


@by_kernels
@pytest.mark.parametrize(
    ("queries", "items", "width", "k", "dtype"),
    [
        (5, 170, 7, 4, torch.float32),  # chunks of items, several classes of groups
        (23, 20, 20, 3, torch.float16),  # chunks of queries
        (3, 16, 8, 20, torch.float32),
        (4, 33, 64, 1, torch.float16),
        (2, 5, 1, 5, torch.float32),
        (0, 9, 3, 2, torch.float16),
        (3, 0, 3, 2, torch.float32),
    ],
)
def test_kernels_sort_with_ties_and_removals(queries, items, width, k, dtype, runner):
    assert_sorted(whole_numbers(queries, items, width, seed=width), k, runner, dtype)


@by_kernels
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e12])
def test_rounded_scores_never_decide(scale, runner):
    """Scores within a thousandth of another, in numbers that 16 bits hold, hold badly or do not hold."""
    problem = around_centres(3, 70, 24, seed=1)
    problem = problem._replace(items=problem.items * scale, queries=problem.queries / scale**0.5)
    problem = problem.placed(runner)
    assert_best(found_by(problem, 5, runner), problem, 5)


@interpreted
@pytest.mark.parametrize("magnitudes", [0, 3, 12])
def test_bounds_hold(magnitudes):
    """Between what is left of a group and its best exact score, for numbers that float16 may not hold."""
    from recsys.ops.top_k import triton as triton_launch

    draw = torch.Generator().manual_seed(3)

    def numbers(rows):
        powers = torch.randint(-magnitudes, magnitudes + 1, (rows, 40), generator=draw)
        return torch.randn(rows, 40, generator=draw) * 2.0**powers

    queries, items = numbers(33), numbers(64)
    queries[0] = 0
    queries[1] *= 2.0**100
    queries[2] *= 2.0**-120
    items[5] = 0
    rounded = triton_launch.round_queries(queries)
    rows = torch.empty(64, 40, dtype=torch.float16)
    widths = torch.empty(4)
    triton_launch.measure(items, rows, widths, rounded.share, 16)
    scale, reach, slack = rounded.facts.double().unbind(1)
    error = widths.double() * reach[:, None] + slack[:, None]
    coarse = (rounded.rows.double() @ rows.double().T) * scale[:, None]
    exact = queries.double() @ items.double().T
    finite = error.repeat_interleave(16, 1).isfinite()
    assert finite.float().mean() > 0.2
    off = (coarse - exact).abs()
    assert (off[finite] <= error.repeat_interleave(16, 1)[finite]).all()
    # And they are not far too wide: 2^-11 of the lengths for each of the roundings.
    lengths = queries.double().norm(dim=1)[:, None] * items.double().norm(dim=1).view(4, 16).amax(1)
    if magnitudes < 12:
        assert (error[3:] <= 2.5 * 2**-11 * lengths[3:]).all()


@interpreted
def test_what_is_not_finite_is_looked_at():
    problem = around_centres(4, 140, 12, seed=2)
    problem.items[20] = torch.inf
    problem.items[70, 3] = -torch.inf
    problem.items[90] = 3e38
    problem.items[91] = 1e36
    problem.items[130] = 1e5  # more than float16 holds
    problem.queries[2] *= 1e4
    problem.queries[3] = problem.queries[3].abs()
    answer, want = found_by(problem, 6, INTERPRETER), found_by(problem, 6, REFERENCE)
    is_number = ~(problem.queries @ problem.items.T).isnan().any(1)
    assert is_number.any()
    assert torch.equal(answer.items[is_number], want.items[is_number])
    torch.testing.assert_close(answer.scores[is_number], want.scores[is_number])


@by_kernels
def test_equal_items_and_a_query_of_zeros_come_in_order(runner):
    """No bound rules any of the items out."""
    number = 50 if runner.is_interpreted else 40_000
    items = torch.randn(12, generator=torch.Generator().manual_seed(1)).expand(number, 12)
    queries = torch.stack([torch.zeros(12), items[0], -items[0]])
    problem = Problem(queries, items, torch.tensor([1, 2, 0]), torch.tensor([2, 1, 0])).placed(runner)
    answer = found_by(problem, 4, runner)
    assert answer.items.tolist() == [[0, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]


@by_kernels
@pytest.mark.parametrize("length", [1050, 2500])
def test_the_best_items_are_removed(length, runner):
    """The best items are removed, and 1,000 others; in the interpreter the best one of each group."""
    if runner.is_interpreted:
        if length > 2000:
            pytest.skip("one length is enough here")
        draw = torch.Generator().manual_seed(4)
        items, queries = torch.randn(160, 8, generator=draw), torch.randn(3, 8, generator=draw)
        items[::16] = 10 * queries[0]
        gone, lengths = torch.arange(0, 160, 16).repeat(3), torch.tensor([10, 10, 10])
        problem = Problem(queries, items, gone, lengths)
    else:
        problem = around_centres(200, 50_000, 64, 7)
        best = exact_scores(problem).topk(length - 1000, dim=1).indices
        gone = torch.cat([best, torch.randint(50_000, (200, 1000))], dim=1)
        problem = problem._replace(removed=gone.flatten(), removed_lengths=torch.full((200,), length))
    problem = problem.placed(runner)
    assert_best(found_by(problem, 5, runner), problem, 5)


@by_kernels
def test_rows_that_do_not_lie_side_by_side(runner):
    problem = around_centres(3, 50, 12, seed=5).placed(runner)
    wide = Problem(problem.queries.T.contiguous().T, problem.items.repeat(1, 2)[:, :12], *problem[2:])
    want, answer = (found_by(rows, 3, runner) for rows in (problem, wide))
    assert torch.equal(answer.items, want.items) and torch.equal(answer.scores, want.scores)


def test_scores_are_those_of_the_product_to_the_bit():
    """Negative ones, zeros of both signs, tiny ones and infinities too; what is -inf cannot be found."""
    scores = torch.tensor([1.5, -1.5, 0.0, -0.0, 1e-45, -1e-45, torch.inf, 3e38, -3e38, -torch.inf])
    answer = top_k(torch.ones(1, 1), scores[:, None], 10, removed=NONE, removed_lengths=torch.tensor([0]))
    assert answer.items.tolist() == [[6, 7, 0, 4, 2, 3, 5, 1, 8, -1]]
    assert answer.scores.tolist() == [[*scores[answer.items[0, :9]].tolist(), -torch.inf]]


@pytest.mark.parametrize("num_items", [5, 1000])
def test_the_reference_does_not_wait_for_the_device(num_items):
    """A tensor on `meta` has no numbers: whoever reads one gets an error."""
    device, lengths = torch.device("meta"), torch.tensor([2, 0, 1])
    queries, items = torch.ones(3, 4, device=device), torch.ones(num_items, 4, device=device)
    with mock.patch.object(reference, "BLOCK", 600):
        answer = top_k(queries, items, 3, removed=torch.tensor([1, 4, 2]), removed_lengths=lengths)
    assert (answer.scores.shape, answer.items.shape) == ((3, 3), (3, 3))


@everywhere
def test_unknown_items_in_the_history_are_passed_over(runner):
    problem = Problem(torch.ones(1, 2), torch.eye(2), torch.tensor([-1, 99]), torch.tensor([2]))
    assert found_by(problem.placed(runner), 2, runner).items.tolist() == [[0, 1]]


def arguments(**changes):
    lengths = torch.zeros(2, dtype=torch.int64)
    plain = {"queries": torch.ones(2, 3), "items": torch.ones(4, 3), "k": 1}
    return plain | {"removed": NONE, "removed_lengths": lengths} | changes


HALF = {"queries": torch.ones(2, 3).bfloat16(), "items": torch.ones(4, 3).bfloat16()}
WIDE, FEW_BITS = {"items": torch.ones(4, 3).double()}, torch.zeros(2, dtype=torch.int32)
WRONG = [
    ({"k": 0}, ValueError, "k is 0"),
    ({"items": torch.ones(4, 2)}, ValueError, r"queries \(2, 3\) and items \(4, 2\)"),
    ({"removed": torch.tensor([1])}, ValueError, "add up to 1"),
    (WIDE, TypeError, r"items \(torch.float64\) float32, bfloat16 or float16"),
    (HALF, TypeError, r"queries \(torch.bfloat16\) must be float32"),
    ({"items": torch.ones(4, 3, device="meta")}, ValueError, "queries are on cpu, items on meta"),
    ({"removed": NONE.to("meta")}, ValueError, "removed must be int64 on the host"),
    ({"removed_lengths": FEW_BITS}, ValueError, "removed_lengths must be int64 on the host.* torch.int32"),
]

test_wrong_arguments_are_named = harness.refused(top_k, arguments, WRONG)


def test_a_backend_that_cannot_run_says_why():
    problem = whole_numbers(2, 4, 3, 0)
    if not INTERPRETED:
        assert "CUDA" in dict(explain("top_k", **problem.arguments(1)).rows)["triton"].reason
        with pytest.raises(ValueError, match="backend 'triton' of top_k cannot run this"):
            top_k(**problem.arguments(1), backend="triton")


@interpreted
@pytest.mark.parametrize("queries", [1, 300, 4096])
@pytest.mark.parametrize("num_items", [1, 127, 128, 10_000_000, 2**32 - 1])
@pytest.mark.parametrize("item_bytes", [16, 256])
def test_chunks_are_bounded_and_cover_the_catalogue(item_bytes, num_items, queries, monkeypatch):
    from recsys.ops.top_k import triton as triton_launch

    monkeypatch.setattr(triton_launch, "CHUNK_BYTES", 512 * 2**20)
    chunk = triton_launch.chunk_of(queries, item_bytes, num_items, 128)
    assert chunk % 128 == 0 and 0 < chunk <= 2**30
    assert chunk * item_bytes <= 512 * 2**20 and chunk // 128 * queries * 4 <= 512 * 2**20
    if num_items < 2**30:
        assert chunk < num_items + 128
    # No more chunks than must be, but for whole groups.
    largest = min(2**27 // queries * 128, 2**29 // item_bytes // 128 * 128)
    assert -(-num_items // chunk) == -(-num_items // largest)


test_in_the_interpreter = harness.interpreter_test(__file__)


# --- on a GPU ---------------------------------------------------------------------------------------------

# (type of the items, width, k): each is compiled for once, whatever the other sizes.
VARIANTS = [
    (torch.float32, 128, 10),
    (torch.bfloat16, 128, 10),
    (torch.float32, 50, 30),
    (torch.float16, 64, 1),
    (torch.bfloat16, 33, 16),
    (torch.float32, 256, 100),
    (torch.bfloat16, 512, 10),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width", "k"), VARIANTS)
@settings(max_examples=12, deadline=None)
@given(queries=st.integers(1, 700), items=st.integers(1, 60_000), seed=st.integers(0, 99))
def test_random_sizes(dtype, width, k, queries, items, seed):
    problem = around_centres(queries, items, width, seed).placed(ON_GPU, dtype)
    assert_best(found_by(problem, k, ON_GPU), problem, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "items", "k"), [(70, 500, 10), (300, 20_000, 10), (9, 40, 64), (5000, 3000, 3)]
)
def test_ties_are_settled_as_in_the_reference(queries, items, k, dtype):
    problem = whole_numbers(queries, items, 6, 2, largest=3).placed(ON_GPU, dtype)
    problem.queries[queries // 2] = 0
    answer, want = (found_by(problem, k, runner) for runner in (ON_GPU, REFERENCE))
    assert torch.equal(answer.items, want.items) and torch.equal(answer.scores, want.scores)


@pytest.mark.gpu
def test_several_chunks_of_queries_and_items(monkeypatch):
    from recsys.ops.top_k import triton as triton_launch

    problem = around_centres(1000, 50_000, 64, 3).placed(ON_GPU)
    whole = found_by(problem, 10, ON_GPU)
    monkeypatch.setattr(triton_launch, "CHUNK_QUERIES", 300)
    monkeypatch.setattr(triton_launch, "CHUNK_BYTES", 1 << 20)
    parts = found_by(problem, 10, ON_GPU)
    assert torch.equal(whole.items, parts.items) and torch.equal(whole.scores, parts.scores)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", [ON_GPU, Runner("reference", "cuda")], ids=["triton", "reference"])
@pytest.mark.parametrize("items", [500, 200_000])
def test_nothing_waits_for_the_device(items, runner):
    problem = around_centres(300, items, 64, 3).placed(runner)
    want = found_by(problem, 10, runner)
    with harness.no_waiting():
        answer = found_by(problem, 10, runner)
    assert torch.equal(answer.items, want.items)


@pytest.mark.gpu
def test_rapid_alternation_of_sizes_compiles_nothing_anew():
    from recsys.ops.top_k.triton import choose_kernel, coarse_kernel, measure_kernel

    sizes = ((1, 1), (7, 16), (512, 2048), (4097, 333), (300, 70_001))
    problems = [around_centres(*size, 128, 5).placed(ON_GPU, torch.bfloat16) for size in sizes]
    want = [found_by(problem, 10, ON_GPU) for problem in problems]
    kernels = (measure_kernel, coarse_kernel, choose_kernel)
    before = harness.artefacts(*kernels)
    rapid = [(i, found_by(problems[i], 10, ON_GPU)) for n in range(30) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, answer in rapid:
        assert torch.equal(answer.items, want[i].items) and torch.equal(answer.scores, want[i].scores)
    assert harness.artefacts(*kernels) == before
    assert_best(want[4], problems[4], 10)


@pytest.mark.gpu
def test_more_than_two_to_the_31_numbers():
    """The best items lie at the end, whose offset 32 bits do not hold."""
    num_items = 2**31 // 128 + 5000
    items = torch.full((num_items, 128), 0.125, dtype=torch.bfloat16, device="cuda")
    items[::128] = 0.25  # scores below differ, so that groups are ruled out
    items[-3:] = torch.tensor([[1.0], [3.0], [2.0]], device="cuda")
    lengths = torch.ones(5, dtype=torch.int64)
    gone = torch.full((5,), num_items - 1)
    answer = top_k(torch.ones(5, 128, device="cuda"), items, 2, removed=gone, removed_lengths=lengths)
    assert answer.items.tolist() == [[num_items - 2, num_items - 3]] * 5
    assert answer.scores.tolist() == [[384.0, 128.0]] * 5


@pytest.mark.gpu
def test_auto_takes_the_fastest():
    problem = whole_numbers(3, 50, 8, 0).placed(ON_GPU)
    for k, expected in ((2, "triton"), (300, "reference")):
        top_k(**problem.arguments(k))
        assert last_backend("top_k") == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(dtype):
    """Scores of 4096 x 3,000,000 would be 46 GiB."""
    draw = torch.Generator("cuda").manual_seed(1)
    items = torch.randn(3_000_000, 64, device="cuda", generator=draw).to(dtype)
    queries = torch.randn(4096, 64, device="cuda", generator=draw)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    top_k(queries, items, 10, removed=NONE, removed_lengths=torch.zeros(4096, dtype=torch.int64))
    assert torch.cuda.max_memory_allocated() - before < 1100 * 2**20
