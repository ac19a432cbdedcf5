"""AUC by hand, at the edges, and on a million rows."""

import time

import pytest
import torch

from recsys import protos as pb
from recsys.modules.metrics.auc import Auc


def auc(predictions: list[float], labels: list[int], weights: list[float] | None = None) -> float:
    metric = Auc(pb.Auc())
    n = len(labels)
    weight = torch.ones(n) if weights is None else torch.tensor(weights)
    metric.update(torch.tensor(predictions), torch.tensor(labels).float(), weight, torch.arange(n))
    return metric.compute().item()


def test_by_hand():
    # Pairs (0.35, 0.1) (0.35, 0.4) (0.8, 0.1) (0.8, 0.4): three of four in order.
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auc([0.9, 0.1], [0, 1]) == 0.0


def test_ties_count_half():
    assert auc([0.5] * 5, [0, 1, 1, 0, 1]) == 0.5
    assert auc([0.5, 0.5, 0.7], [0, 1, 1]) == 0.75


def test_weighted_pairs():
    # Positive 0.6 of weight 2 beats 0.4 (weight 1) and loses to 0.8 (weight 3): 2 of 8.
    assert auc([0.6, 0.4, 0.8], [1, 0, 0], [2.0, 1.0, 3.0]) == 0.25


def test_infinite_predictions_are_ordered_and_nan_is_not():
    assert auc([-torch.inf, 0.3, torch.inf, torch.inf], [0, 0, 1, 1]) == 1.0
    assert torch.tensor(auc([0.1, torch.nan, 0.9], [0, 1, 1])).isnan()


def test_neighbouring_floats_are_no_tie():
    just_above = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)).item()
    assert auc([0.5, just_above], [0, 1]) == 1.0


def test_a_million_rows_are_exact_and_quick():
    # Positives at 1, 3, 5, ...; negatives at 0, 2, 4, ...: positive i beats i + 1 of h negatives.
    half = 500_000
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(0))
    predictions = torch.arange(2 * half, dtype=torch.float32)[order]
    metric = Auc(pb.Auc())
    for chunk in torch.arange(2 * half).split(10_000):
        ones = torch.ones(len(chunk))
        metric.update(predictions[chunk], predictions[chunk] % 2, ones, chunk)
    start = time.perf_counter()
    actual = metric.compute().item()
    seconds = time.perf_counter() - start
    assert actual == pytest.approx((half + 1) / (2 * half), rel=1e-15)
    assert seconds < 20  # 0.8 s on one quiet core; a loop over pairs or rows takes minutes
