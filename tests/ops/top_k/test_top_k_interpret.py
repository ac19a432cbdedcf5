"""The Triton kernels of `top_k` on a CPU: numbers, not code generation."""

import pytest
import torch

from recsys.ops import explain, last_backend, top_k
from tests.ops.top_k.problems import Problem, around_centres, brute_force, whole_numbers
from tests.tools.interpreter import (
    INTERPRETED,
    between_poison,
    interpreted,
    run_interpreted,
    starts_it,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Several groups, parts of groups, classes, chunks of queries and of items."""
    if not INTERPRETED:
        return
    from recsys.ops.top_k import triton_launch

    small = dict.fromkeys((64, 128, 256, 512), triton_launch.Blocks(16, 16, 4, 1))
    changed = {"BLOCKS": small, "CLASSES": 8, "PART": 2, "REMOVED": 8, "STEP": 64}
    for name, value in (changed | {"CHUNK_QUERIES": 20, "CHUNK_BYTES": 20 * 4 * 10}).items():
        monkeypatch.setattr(triton_launch, name, value)


def poisoned(given: Problem) -> Problem:
    return given._replace(queries=between_poison(given.queries), items=between_poison(given.items))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("queries", "items", "width", "k"),
    [
        (5, 400, 7, 4),
        (23, 60, 20, 3),
        (3, 16, 8, 20),
        (4, 33, 64, 1),
        (2, 5, 1, 5),
        (0, 9, 3, 2),
        (3, 0, 3, 2),
    ],
)
def test_equals_brute_force_with_ties_and_removals(queries, items, width, k, dtype):
    given = whole_numbers(queries, items, width, seed=width)
    given = given._replace(items=given.items.to(dtype))
    found = top_k(**poisoned(given).arguments(k), backend="triton")
    assert last_backend("top_k") == "triton"
    scores, indices = brute_force(given, k)
    assert found.items.tolist() == indices
    assert found.scores.tolist() == scores


def assert_best(found, given, k):
    """The scores are those of the items, and no better item was left out; items whose scores differ by more
    than float32 can tell are the same."""
    scores, indices = (torch.tensor(one) for one in brute_force(given, k))
    error = 1e-6 * given.queries.double().norm(dim=1).amax() * given.items.double().norm(dim=1).amax()
    assert (found.scores.double() - scores).abs().max() <= error
    exact = given.items.double()[found.items] @ given.queries.double()[:, :, None]
    assert (found.scores.double() - exact[:, :, 0]).abs().max() <= error
    apart = torch.ones_like(scores, dtype=torch.bool)
    close = scores[:, :-1] - scores[:, 1:] <= 2 * error
    apart[:, :-1] &= ~close
    apart[:, 1:] &= ~close
    apart[:, -1] = False
    assert apart.sum() > apart.numel() / 3
    assert torch.equal(found.items[apart], indices[apart])


@interpreted
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e12, 1e-30])
def test_rounded_scores_never_decide(scale):
    """Scores within a thousandth of another, in numbers that 16 bits hold, hold badly or do not hold."""
    given = around_centres(6, 200, 24, seed=1)
    given = given._replace(items=given.items * scale, queries=given.queries / scale**0.5)
    assert_best(top_k(**given.arguments(5), backend="triton"), given, 5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("magnitudes", [0, 3, 12])
def test_bounds_hold(magnitudes, dtype):
    """Between what is left of a group and its best exact score, for numbers that float16 may not hold."""
    from recsys.ops.top_k import triton_launch

    draw = torch.Generator().manual_seed(3)

    def numbers(rows):
        powers = torch.randint(-magnitudes, magnitudes + 1, (rows, 40), generator=draw)
        return torch.randn(rows, 40, generator=draw) * 2.0**powers

    queries, items = numbers(33), numbers(64).to(dtype)
    queries[0] = 0
    queries[1] *= 2.0**100
    queries[2] *= 2.0**-120
    items[5] = 0
    rounded = triton_launch.round_queries(queries, torch.float16)
    copied = dtype == torch.float32
    rows = torch.empty(64, 40, dtype=torch.float16) if copied else items
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
    given = around_centres(4, 200, 12, seed=2)
    given.items[20] = torch.inf
    given.items[70, 3] = -torch.inf
    given.items[90] = 3e38
    given.items[91] = 1e36
    given.items[130] = 1e5  # more than float16 holds
    given.queries[2] *= 1e4
    given.queries[3] = given.queries[3].abs()
    found = top_k(**given.arguments(6), backend="triton")
    want = top_k(**given.arguments(6), backend="reference")
    known = ~(given.queries @ given.items.T).isnan().any(1)
    assert known.any()
    assert torch.equal(found.items[known], want.items[known])
    torch.testing.assert_close(found.scores[known], want.scores[known])


@interpreted
def test_equal_items_and_a_query_of_zeros_come_in_order():
    items = torch.randn(12, generator=torch.Generator().manual_seed(1)).expand(90, 12)
    queries = torch.stack([torch.zeros(12), items[0], -items[0]])
    lengths = torch.tensor([2, 1, 0])
    found = top_k(
        queries, items, 4, removed=torch.tensor([1, 2, 0]), removed_lengths=lengths, backend="triton"
    )
    assert found.items.tolist() == [[0, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]


@interpreted
def test_the_best_items_are_removed():
    """One item of each group scores far above the rest, and is removed."""
    draw = torch.Generator().manual_seed(4)
    items = torch.randn(160, 8, generator=draw)
    queries = torch.randn(3, 8, generator=draw)
    items[::16] = 10 * queries[0]
    gone = torch.arange(0, 160, 16).repeat(3)
    given = Problem(queries, items, gone, torch.tensor([10, 10, 10]))
    found = top_k(**given.arguments(5), backend="triton")
    assert found.items.tolist() == brute_force(given, 5)[1]


@interpreted
def test_rows_that_do_not_lie_side_by_side():
    given = around_centres(3, 50, 12, seed=5)
    wide = Problem(given.queries.T.contiguous().T, given.items.repeat(1, 2)[:, :12], *given[2:])
    want, found = (top_k(**one.arguments(3), backend="triton") for one in (given, wide))
    assert torch.equal(found.items, want.items) and torch.equal(found.scores, want.scores)


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu_and_what_is_too_large_is_refused():
    given = whole_numbers(2, 3, 4, 0)
    top_k(**given.arguments(1))
    assert last_backend("top_k") == "reference"

    def reason(given, k):
        return dict(explain("top_k", **given.arguments(k)).rows)["triton"].reason

    assert reason(given, 256) == "" and reason(whole_numbers(2, 3, 512, 0), 1) == ""
    assert "it finds up to 256" in reason(given, 257)
    assert "it takes 1 to 512" in reason(whole_numbers(2, 3, 513, 0), 1)


@interpreted
@pytest.mark.parametrize("queries", [1, 300, 4096])
@pytest.mark.parametrize("num_items", [1, 127, 128, 10_000_000, 2**32 - 1])
@pytest.mark.parametrize("item_bytes", [0, 256])
def test_chunks_are_bounded_and_cover_the_catalogue(item_bytes, num_items, queries, monkeypatch):
    from recsys.ops.top_k import triton_launch

    monkeypatch.setattr(triton_launch, "CHUNK_BYTES", 512 * 2**20)
    chunk = triton_launch.chunk_of(queries, item_bytes, num_items, 128)
    assert chunk % 128 == 0 and 0 < chunk <= 2**30
    assert chunk * item_bytes <= 512 * 2**20 and chunk // 128 * queries * 4 <= 512 * 2**20
    if num_items < 2**30:
        assert chunk < num_items + 128
    # No more chunks than must be, but for whole groups.
    chunks, most = -(-num_items // chunk), min(2**30, 2**27 // queries * 128)
    most = min(most, 2**29 // item_bytes // 128 * 128) if item_bytes else most
    assert chunks == -(-num_items // most)


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
