"""Exact top-k against sorting every score in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.inference.topk import top_k


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
    st.integers(0, 23),
    st.integers(1, 30),
    st.sampled_from([1, 4, 7, 64]),
    st.integers(0, 10_000),
)
def test_equals_brute_force_with_ties_and_removals(num_queries, num_items, k, block, seed):
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
