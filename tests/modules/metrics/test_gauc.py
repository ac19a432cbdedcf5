"""GAUC by hand: which users count, and how much."""

import pytest
import torch

from recsys import protos as pb
from recsys.modules.metrics.gauc import Gauc


def gauc(predictions: list[float], labels: list[int], groups: list[int]) -> float:
    metric = Gauc(pb.Gauc())
    ones = torch.ones(len(labels))
    metric.update(torch.tensor(predictions), torch.tensor(labels).float(), ones, torch.tensor(groups))
    return metric.compute().item()


def test_users_count_by_their_candidates():
    # User 5: three candidates, AUC 1/2. User 2: two candidates, AUC 1. User 9 has no negative.
    predictions = [0.5, 0.2, 0.9, 0.3, 0.8, 0.1]
    labels = [1, 0, 0, 0, 1, 1]
    assert gauc(predictions, labels, [5, 5, 5, 2, 2, 9]) == pytest.approx((3 * 0.5 + 2 * 1.0) / 5)


def test_only_the_order_within_a_user_counts():
    # Over all rows the AUC is 0.5: user 1's scores are all above user 2's.
    assert gauc([0.9, 0.8, 0.2, 0.1], [1, 0, 1, 0], [1, 1, 2, 2]) == 1.0


def test_equal_predictions_of_different_users_are_no_tie():
    assert gauc([0.5, 0.4, 0.5, 0.6], [1, 0, 0, 1], [1, 1, 2, 2]) == 1.0


def test_a_user_s_rows_need_not_be_neighbours():
    assert gauc([0.9, 0.1, 0.2, 0.8], [1, 1, 0, 0], [1, 2, 1, 2]) == 0.5


def test_groups_that_differ_beyond_float32():
    assert gauc([0.9, 0.1, 0.2, 0.8], [1, 0, 1, 0], [2**53, 2**53, 2**53 + 1, 2**53 + 1]) == 0.5


def test_no_user_with_both_classes_is_undefined():
    assert torch.tensor(gauc([0.9, 0.1], [1, 0], [1, 2])).isnan()
