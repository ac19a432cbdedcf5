"""Exact top-k against sorting every score in plain Python."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.ops import explain, last_backend, top_k
from recsys.ops.top_k import reference
from tests.ops.top_k.problems import brute_force, whole_numbers
from tests.tools.interpreter import INTERPRETED

NONE = torch.zeros(0, dtype=torch.int64)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(0, 40),
    st.one_of(st.integers(1, 3), st.integers(1, 30)),
    st.sampled_from([1, 4, 7, 64]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 10_000),
)
def test_equals_brute_force_with_ties_and_removals(num_queries, num_items, k, block, group, dtype, seed):
    problem = whole_numbers(num_queries, num_items, 3, seed)
    problem = problem._replace(items=problem.items.to(dtype))
    with mock.patch.multiple(reference, GROUP=group, BLOCK=block):
        found = top_k(**problem.arguments(k))
    assert last_backend("top_k") == "reference"
    scores, items = brute_force(problem, k)
    assert found.items.tolist() == items
    assert found.scores.tolist() == scores


def test_scores_are_those_of_the_product_to_the_bit():
    """Negative ones, zeros of both signs, tiny ones and infinities too; what is -inf cannot be found."""
    scores = torch.tensor([1.5, -1.5, 0.0, -0.0, 1e-45, -1e-45, torch.inf, 3e38, -3e38, -torch.inf])
    found = top_k(torch.ones(1, 1), scores[:, None], 10, removed=NONE, removed_lengths=torch.tensor([0]))
    assert found.items.tolist() == [[6, 7, 0, 4, 2, 3, 5, 1, 8, -1]]
    assert found.scores.tolist() == [[*scores[found.items[0, :9]].tolist(), -torch.inf]]


@pytest.mark.parametrize("num_items", [5, 1000])
def test_nothing_waits_for_the_device(num_items):
    """A tensor on `meta` has no numbers: whoever reads one gets an error."""
    device, lengths = torch.device("meta"), torch.tensor([2, 0, 1])
    queries, items = torch.ones(3, 4, device=device), torch.ones(num_items, 4, device=device)
    with mock.patch.object(reference, "BLOCK", 600):
        found = top_k(queries, items, 3, removed=torch.tensor([1, 4, 2]), removed_lengths=lengths)
    assert (found.scores.shape, found.items.shape) == ((3, 3), (3, 3))


def test_unknown_items_in_the_history_are_passed_over():
    found = top_k(
        torch.ones(1, 2), torch.eye(2), 2, removed=torch.tensor([-1, 99]), removed_lengths=torch.tensor([2])
    )
    assert found.items.tolist() == [[0, 1]]


def test_errors_name_what_is_wrong():
    queries, items, lengths = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)
    gone = {"removed": NONE, "removed_lengths": lengths}
    with pytest.raises(ValueError, match="k is 0"):
        top_k(queries, items, 0, **gone)
    with pytest.raises(ValueError, match=r"queries \(2, 3\) and items \(4, 2\)"):
        top_k(queries, items[:, :2], 1, **gone)
    with pytest.raises(ValueError, match="add up to 1"):
        top_k(queries, items, 1, removed=torch.tensor([1]), removed_lengths=lengths)
    with pytest.raises(TypeError, match=r"items \(torch.float64\) float32, bfloat16 or float16"):
        top_k(queries, items.double(), 1, **gone)
    with pytest.raises(TypeError, match=r"queries \(torch.bfloat16\) must be float32"):
        top_k(queries.bfloat16(), items.bfloat16(), 1, **gone)
    with pytest.raises(ValueError, match="queries are on cpu, items on meta"):
        top_k(queries, items.to("meta"), 1, **gone)
    with pytest.raises(ValueError, match="removed must be int64 on the host"):
        top_k(queries, items, 1, removed=NONE.to("meta"), removed_lengths=lengths)
    with pytest.raises(ValueError, match="removed_lengths must be int64 on the host.* torch.int32"):
        top_k(queries, items, 1, removed=NONE, removed_lengths=lengths.int())


def test_a_backend_that_cannot_run_says_why():
    problem = whole_numbers(2, 4, 3, 0)
    if not INTERPRETED:
        assert "CUDA" in dict(explain("top_k", **problem.arguments(1)).rows)["triton"].reason
        with pytest.raises(ValueError, match="backend 'triton' of top_k cannot run this"):
            top_k(**problem.arguments(1), backend="triton")
