"""Bins against sorted lists of candidates, in Python floats."""

import math

import pytest
import torch

from recsys.modules.metrics.reliability import Reliability
from tests.modules.metrics.helpers import Candidates, random_candidates


def bins_of(*batches: Candidates, num_bins: int = 10):
    metric = Reliability(num_bins)
    for batch in batches:
        metric.update(*batch)
    return metric.bins()


def candidates(predictions, labels, weights=None) -> Candidates:
    count = len(predictions)
    columns = (predictions, labels, [1.0] * count if weights is None else weights)
    return Candidates(*map(torch.tensor, columns), torch.zeros(count, dtype=torch.int64))


def far_apart(count: int, seed: int = 0) -> Candidates:
    """Predictions that differ by far more than a cell, in random order."""
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.sigmoid(torch.linspace(-4, 4, count))[torch.randperm(count, generator=generator)]
    labels = (torch.rand(count, generator=generator) < 0.3).float()
    return Candidates(predictions, labels, torch.ones(count), torch.zeros(count, dtype=torch.int64))


def test_bins_are_runs_of_the_sorted_candidates():
    data = far_apart(200)
    ordered = sorted(zip(data.predictions.tolist(), data.labels.tolist(), strict=True))
    actual = bins_of(data)
    assert [item.candidates for item in actual] == [20] * 10
    for number, item in enumerate(actual):
        part = ordered[20 * number : 20 * number + 20]
        assert item.predicted == pytest.approx(sum(p for p, _ in part) / 20, rel=1e-6)
        assert item.observed == pytest.approx(sum(y for _, y in part) / 20)


@pytest.mark.parametrize("seed", range(4))
def test_ties_stay_together_and_nobody_is_lost(seed):
    data = random_candidates(300, levels=7, seed=seed)
    actual = bins_of(data)
    kept = [(p, y) for p, y, w in zip(*(c.tolist() for c in data[:3]), strict=True) if w]
    groups = {p: [y for q, y in kept if q == p] for p in sorted({p for p, _ in kept})}
    assert sum(item.candidates for item in actual) == len(kept)
    # Six values, each of more than a tenth of the candidates: a bin each.
    assert [item.candidates for item in actual] == [len(labels) for labels in groups.values()]
    assert [item.predicted for item in actual] == pytest.approx(list(groups), rel=1e-6)
    rates = [sum(labels) / len(labels) for labels in groups.values()]
    assert [item.observed for item in actual] == pytest.approx(rates)


def test_weights_decide_means_and_sizes():
    data = candidates([0.1, 0.2, 0.6, 0.9], [1.0, 0.0, 1.0, 1.0], [3.0, 1.0, 4.0, 0.0])
    first, second = bins_of(data, num_bins=2)
    assert (first.candidates, second.candidates) == (2, 1)
    assert first.predicted == pytest.approx((3 * 0.1 + 0.2) / 4)
    assert first.observed == pytest.approx(3 / 4)
    assert (second.predicted, second.observed) == (pytest.approx(0.6), 1.0)


def test_batches_add_up():
    data = random_candidates(90)
    parts = [data.take(slice(0, 50)), data.take(slice(50, 50)), data.take(slice(50, 90))]
    assert bins_of(*parts) == bins_of(data)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class(label):
    data = far_apart(40)
    actual = bins_of(data._replace(labels=torch.full((40,), label)))
    assert {item.observed for item in actual} == {label}
    assert sum(item.candidates for item in actual) == 40


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_candidates():
    assert bins_of() == []
    assert bins_of(candidates([0.5, 0.2], [1.0, 0.0], [0.0, 0.0])) == []


def test_certainty_counts():
    actual = bins_of(candidates([0.0, 1.0, 0.5], [0.0, 1.0, 1.0]))
    assert [(item.predicted, item.observed) for item in actual] == [(0, 0), (0.5, 1), (1, 1)]


def test_what_is_not_a_number_is_seen_in_the_first_bin_only():
    first, *others = bins_of(candidates([math.nan, 0.5, 0.7], [0.0, 1.0, 1.0]))
    assert math.isnan(first.predicted)
    assert [item.predicted for item in others] == pytest.approx([0.5, 0.7])


def test_a_row_of_weight_zero_counts_nowhere_even_as_nan():
    data = candidates([0.25, math.nan], [1.0, math.nan], [1.0, 0.0])
    assert bins_of(data) == [(1, 0.25, 1.0)]
