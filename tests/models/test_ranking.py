import pytest
import torch

from recsys.models.ranking import rank_targets
from recsys.ops import SequenceLayout


def brute_force(queries, items, targets, seen):
    ranks = []
    for row, (query, wanted) in enumerate(zip(queries, targets, strict=True)):
        for target in wanted:
            if target == 0:
                ranks.append(len(items) + 1)
                continue
            scores = {k + 1: float(query @ item) for k, item in enumerate(items)}
            if target in seen[row]:
                ranks.append(len(items) + 1)
                continue
            others = [k for k in scores if k != target and k not in seen[row]]
            ranks.append(1 + sum(not scores[k] < scores[target] for k in others))
    return ranks


def ranks(queries, items, targets, seen, max_scores=10**6):
    flat = torch.tensor(sum(targets, []), dtype=torch.int64)
    return rank_targets(
        queries,
        items,
        targets=flat,
        num_targets=torch.tensor([len(items) for items in targets]),
        removed=torch.tensor(sum(seen, []), dtype=torch.int64),
        removed_layout=SequenceLayout(torch.tensor([len(items) for items in seen])),
        missed=torch.tensor(
            [item in row for row, wanted in zip(seen, targets, strict=True) for item in wanted]
        ).bool(),
        max_scores=max_scores,
    ).tolist()


# Targets of each row (0: unknown), and what it has seen (its target, an unknown item, one twice, nothing).
TARGETS = [[3], [], [1, 9, 0], [5]]
SEEN = [[1, 2, 2, 0], [4], [9, 7], []]


@pytest.mark.parametrize("max_scores", [1, 25, 10**6])
def test_equals_brute_force_whatever_the_block(max_scores):
    queries, items = torch.randn(4, 3), torch.randn(10, 3)
    actual = ranks(queries, items, TARGETS, SEEN, max_scores)
    assert actual == brute_force(queries, items, TARGETS, SEEN)


def test_ties_count_against_the_model():
    queries, items = torch.zeros(4, 3), torch.randn(10, 3)
    # 10 items less what the row has seen; a seen target and an unknown one cannot be found.
    assert ranks(queries, items, TARGETS, SEEN) == [8, 8, 11, 11, 10]


def test_scores_that_are_no_numbers_find_nothing():
    items = torch.randn(10, 3)
    assert ranks(torch.full((4, 3), torch.nan), items, TARGETS, SEEN) == [8, 8, 11, 11, 10]


def test_no_targets():
    assert ranks(torch.randn(2, 3), torch.randn(4, 3), [[], []], [[1], []]) == []
