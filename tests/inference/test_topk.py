"""Exact top-k against sorting every score in plain Python."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.inference import topk
from recsys.inference.topk import top_k
from tests.models.test_no_host_sync import no_waiting


def brute_force(queries, items, k, removed):
    found = []
    for query, gone in zip(queries.tolist(), removed, strict=True):
        ranked = sorted(
            (-sum(a * b for a, b in zip(query, item, strict=True)), index)
            for index, item in enumerate(items.tolist())
            if index not in gone
        )[:k]
        found.append([index for _, index in ranked] + [-1] * (k - len(ranked)))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 40),
    st.one_of(st.integers(1, 3), st.integers(1, 30)),
    st.sampled_from([1, 4, 7, 64]),
    st.sampled_from([1, 2, 64]),
    st.integers(0, 10_000),
)
def test_equals_brute_force_with_ties_and_removals(num_queries, num_items, k, block, group, seed):
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers: products are exact, and equal scores are common.
    queries = torch.randint(-2, 3, (num_queries, 3), generator=generator).float()
    items = torch.randint(-2, 3, (num_items, 3), generator=generator).float()
    removed = [
        torch.randint(
            0, max(num_items, 1), (int(torch.randint(0, 6, (), generator=generator)),), generator=generator
        ).tolist()
        for _ in range(num_queries)
    ]
    with mock.patch.object(topk, "GROUP", group):
        found = top_k(
            queries,
            items,
            k,
            removed=torch.tensor([index for row in removed for index in row], dtype=torch.int64),
            removed_lengths=torch.tensor([len(row) for row in removed], dtype=torch.int64),
            block=block,
        )
    assert found.items.tolist() == brute_force(queries, items, k, removed)
    expected = [
        [
            sum(a * b for a, b in zip(q, items[i].tolist(), strict=True)) if i >= 0 else -float("inf")
            for i in row
        ]
        for q, row in zip(queries.tolist(), found.items.tolist(), strict=True)
    ]
    assert found.scores.tolist() == expected


def test_scores_are_those_of_the_product_to_the_bit():
    """Negative ones, zeros of both signs, tiny ones and infinities too; what is -inf cannot be found."""
    scores = torch.tensor([1.5, -1.5, 0.0, -0.0, 1e-45, -1e-45, torch.inf, 3e38, -3e38, -torch.inf])
    none = torch.zeros(0, dtype=torch.int64)
    found = top_k(torch.ones(1, 1), scores[:, None], 10, removed=none, removed_lengths=torch.tensor([0]))
    assert found.items.tolist() == [[6, 7, 0, 4, 2, 3, 5, 1, 8, -1]]
    assert found.scores.tolist() == [[*scores[found.items[0, :9]].tolist(), -torch.inf]]


@pytest.mark.parametrize("num_items", [5, 1000])
def test_nothing_waits_for_the_device(num_items):
    """A tensor on `meta` has no numbers: whoever reads one gets an error."""
    device, lengths = torch.device("meta"), torch.tensor([2, 0, 1])
    queries, items = torch.ones(3, 4, device=device), torch.ones(num_items, 4, device=device)
    found = top_k(queries, items, 3, removed=torch.tensor([1, 4, 2]), removed_lengths=lengths, block=600)
    assert (found.scores.shape, found.items.shape) == ((3, 3), (3, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_items", [500, 20_000])
def test_on_a_gpu_it_is_the_same_and_waits_for_nothing(num_items):
    draw = torch.Generator().manual_seed(2)
    queries, items = (torch.randint(-3, 4, (n, 6), generator=draw).float() for n in (70, num_items))
    removed = torch.randint(-1, num_items, (700,), generator=draw)
    lengths = torch.full((70,), 10)
    expected = top_k(queries, items, 10, removed=removed, removed_lengths=lengths, block=3000)
    queries, items = queries.cuda(), items.cuda()
    with no_waiting():
        found = top_k(queries, items, 10, removed=removed, removed_lengths=lengths, block=3000)
    assert torch.equal(found.items.cpu(), expected.items)
    assert torch.equal(found.scores.cpu(), expected.scores)


def test_unknown_items_in_the_history_are_passed_over():
    found = top_k(
        torch.ones(1, 2), torch.eye(2), 2, removed=torch.tensor([-1, 99]), removed_lengths=torch.tensor([2])
    )
    assert found.items.tolist() == [[0, 1]]


def test_errors_name_what_is_wrong():
    queries, items, none = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(0, dtype=torch.int64)
    lengths = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="k is 0"):
        top_k(queries, items, 0, removed=none, removed_lengths=lengths)
    with pytest.raises(ValueError, match=r"queries \(2, 3\) and items \(4, 2\)"):
        top_k(queries, items[:, :2], 1, removed=none, removed_lengths=lengths)
    with pytest.raises(ValueError, match="add up to 1"):
        top_k(queries, items, 1, removed=torch.tensor([1]), removed_lengths=lengths)
    with pytest.raises(ValueError, match=r"items \(torch.float64, cpu\) must be float32 on one device"):
        top_k(queries, items.double(), 1, removed=none, removed_lengths=lengths)
    with pytest.raises(ValueError, match="must be on the host"):
        top_k(queries, items, 1, removed=none.to("meta"), removed_lengths=lengths)
