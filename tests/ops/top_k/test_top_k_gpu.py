"""The kernels of `top_k` on a GPU: answers, repeatability, sizes in any order, memory."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import last_backend, top_k
from tests.ops import harness
from tests.ops.top_k.problems import Problem, around_centres, whole_numbers

pytestmark = pytest.mark.gpu

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


def on_device(given: Problem, dtype=torch.float32) -> Problem:
    return given._replace(queries=given.queries.cuda(), items=given.items.cuda().to(dtype))


def found_by(given, k, backend="triton"):
    found = top_k(**given.arguments(k), backend=backend)
    assert last_backend("top_k") == backend
    return found


def exact(given: Problem):
    """float64 [B, V], -inf for removed items."""
    scores = given.queries.double() @ given.items.double().T
    row = torch.repeat_interleave(given.removed_lengths).cuda()
    item = given.removed.cuda()
    known = (item >= 0) & (item < len(given.items))
    scores[row[known], item[known]] = -torch.inf
    return scores


def assert_best(found, given, k):
    """Every score is that of its item; each place has the score that it must have."""
    scores = exact(given)
    if scores.shape[1] < k:
        scores = torch.nn.functional.pad(scores, (0, k - scores.shape[1]), value=-torch.inf)
    best = scores.topk(k).values
    left = best > -torch.inf
    assert torch.equal(found.items >= 0, left) and torch.equal(found.scores > -torch.inf, left)
    theirs = scores.gather(1, found.items.clamp(min=0))
    for want in (best, theirs):
        torch.testing.assert_close(found.scores[left].double(), want[left], rtol=1e-5, atol=1e-5)
    ordered = found.items.sort(1).values
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()


@pytest.mark.parametrize(("dtype", "width", "k"), VARIANTS)
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(queries=st.integers(1, 700), items=st.integers(1, 60_000), seed=st.integers(0, 99))
def test_random_sizes(dtype, width, k, queries, items, seed):
    given = on_device(around_centres(queries, items, width, seed), dtype)
    assert_best(found_by(given, k), given, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "items", "k"), [(70, 500, 10), (300, 20_000, 10), (9, 40, 64), (5000, 3000, 3)]
)
def test_ties_are_settled_as_in_the_reference(queries, items, k, dtype):
    given = on_device(whole_numbers(queries, items, 6, 2, most=3), dtype)
    given.queries[queries // 2] = 0
    found, want = found_by(given, k), found_by(given, k, "reference")
    assert torch.equal(found.items, want.items) and torch.equal(found.scores, want.scores)


def test_several_chunks_of_queries_and_items(monkeypatch):
    from recsys.ops.top_k import triton_launch

    given = on_device(around_centres(1000, 50_000, 64, 3))
    whole = found_by(given, 10)
    monkeypatch.setattr(triton_launch, "CHUNK_QUERIES", 300)
    monkeypatch.setattr(triton_launch, "CHUNK_BYTES", 1 << 20)
    parts = found_by(given, 10)
    assert torch.equal(whole.items, parts.items) and torch.equal(whole.scores, parts.scores)


def test_equal_items_all_over_the_catalogue():
    """No bound rules any of them out."""
    items = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).expand(40_000, 64).contiguous()
    given = on_device(around_centres(50, 40_000, 64, 3)._replace(items=items))
    gone = given.removed.split(given.removed_lengths.tolist())
    want = [[i for i in range(30) if i not in set(one.tolist())][:10] for one in gone]
    assert found_by(given, 10).items.tolist() == want


@pytest.mark.parametrize("length", [50, 1500])
def test_the_best_items_are_removed(length):
    """The best items and 1,000 others are removed."""
    given = on_device(around_centres(200, 50_000, 64, 7))
    best = exact(given).topk(length, dim=1).indices.cpu()
    longer = torch.cat([best, torch.randint(50_000, (200, 1000))], dim=1)
    lengths = torch.full((200,), longer.shape[1])
    given = given._replace(removed=longer.flatten(), removed_lengths=lengths)
    assert_best(found_by(given, 10), given, 10)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("items", [500, 200_000])
def test_nothing_waits_for_the_device(items, backend):
    given = on_device(around_centres(300, items, 64, 3))
    want = found_by(given, 10, backend)
    with harness.no_waiting():
        found = top_k(**given.arguments(10), backend=backend)
    assert torch.equal(found.items, want.items)


def test_rapid_alternation_of_sizes_compiles_nothing_anew():
    from recsys.ops.top_k.triton_kernels import choose_kernel, coarse_kernel, measure_kernel

    sizes = ((1, 1), (7, 16), (512, 2048), (4097, 333), (300, 70_001))
    problems = [on_device(around_centres(*size, 128, 5), torch.bfloat16) for size in sizes]
    want = [found_by(given, 10) for given in problems]
    kernels = (measure_kernel, coarse_kernel, choose_kernel)
    before = harness.artefacts(*kernels)
    rapid = [(i, found_by(problems[i], 10)) for n in range(30) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, found in rapid:
        assert torch.equal(found.items, want[i].items) and torch.equal(found.scores, want[i].scores)
    assert harness.artefacts(*kernels) == before
    assert_best(want[4], problems[4], 10)


def test_more_than_two_to_the_31_numbers():
    """The best items lie at the end, whose offset 32 bits do not hold."""
    num_items = 2**31 // 128 + 5000
    items = torch.full((num_items, 128), 0.125, dtype=torch.bfloat16, device="cuda")
    items[::128] = 0.25  # scores below differ, so that groups are ruled out
    items[-3:] = torch.tensor([[1.0], [3.0], [2.0]], device="cuda")
    lengths = torch.ones(5, dtype=torch.int64)
    gone = torch.full((5,), num_items - 1)
    found = top_k(torch.ones(5, 128, device="cuda"), items, 2, removed=gone, removed_lengths=lengths)
    assert found.items.tolist() == [[num_items - 2, num_items - 3]] * 5
    assert found.scores.tolist() == [[384.0, 128.0]] * 5


def test_auto_takes_the_fastest():
    given = on_device(whole_numbers(3, 50, 8, 0))
    top_k(**given.arguments(2))
    assert last_backend("top_k") == "triton"
    top_k(**given.arguments(300))
    assert last_backend("top_k") == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(dtype):
    """Scores of 4096 x 3,000,000 would be 46 GiB."""
    draw = torch.Generator("cuda").manual_seed(1)
    items = torch.randn(3_000_000, 64, device="cuda", generator=draw).to(dtype)
    queries = torch.randn(4096, 64, device="cuda", generator=draw)
    none, lengths = torch.zeros(0, dtype=torch.int64), torch.zeros(4096, dtype=torch.int64)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    top_k(queries, items, 10, removed=none, removed_lengths=lengths)
    assert torch.cuda.max_memory_allocated() - before < 1100 * 2**20
