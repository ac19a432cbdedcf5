"""Baselines without training against loops over pairs of events and over the catalogue."""

import math

import numpy as np
import pytest

from recsys import config
from recsys.config.declarations import SeenRule
from recsys.evaluation import baselines, co_occurrence
from recsys.evaluation.baselines import rank_targets
from recsys.evaluation.co_occurrence import CoOccurrence, Settings, popularity
from recsys.evaluation.interactions import Interactions

NUM_ITEMS = 12


def random_rows(seed: int, rows: int, longest: int) -> tuple[Interactions, list[list[int]], list[int]]:
    """Histories with repeats, unknown items (0) and empty rows, as arrays and as lists; a target each."""
    generator = np.random.default_rng(seed)
    histories = [generator.integers(0, NUM_ITEMS + 1, generator.integers(0, longest)) for _ in range(rows)]
    targets = generator.integers(0, NUM_ITEMS + 1, rows)
    lengths = np.array([len(history) for history in histories])
    arrays = Interactions(np.concatenate(histories), lengths, targets, np.ones(rows, np.int64), NUM_ITEMS)
    return arrays, [history.tolist() for history in histories], targets.tolist()


@pytest.mark.parametrize("most_dense", [0, NUM_ITEMS])
@pytest.mark.parametrize("symmetric", [False, True])
def test_co_occurrence_against_loops_over_pairs(monkeypatch, most_dense, symmetric):
    monkeypatch.setattr(co_occurrence, "MOST_DENSE", most_dense)
    train, training_lists, _ = random_rows(0, 30, 40)
    rows, lists, _ = random_rows(1, 8, 30)
    settings = Settings(symmetric, 0.7, 0.8, 0.5, 0.25)
    together, events = np.zeros((NUM_ITEMS + 1, NUM_ITEMS + 1)), np.zeros(NUM_ITEMS + 1)
    for history in training_lists:
        for place, item in enumerate(history):
            events[item] += 1
            for later in range(place + 1, min(place + 21, len(history))):
                if history[later] != item:
                    together[item, history[later]] += (later - place) ** -0.7
    if symmetric:
        together = together + together.T
    expected = np.zeros((len(lists), NUM_ITEMS))
    for row, history in enumerate(lists):
        for age, item in enumerate(reversed(history)):
            if item and 0.8**age >= 0.01:
                expected[row] += 0.8**age * together[item, 1:] / (events[item] + 1) ** 0.5
    expected /= (events[1:] + 1) ** 0.25
    np.testing.assert_allclose(CoOccurrence.fit(train, settings).scores(rows), expected, rtol=1e-5, atol=1e-9)


def test_items_that_no_neighbor_reaches_follow_by_popularity():
    train = Interactions(np.array([1, 2, 3, 3, 4]), np.array([2, 1, 1, 1]), *np.zeros((2, 0), np.int64), 4)
    rows = Interactions(np.array([1]), np.array([1]), *np.zeros((2, 0), np.int64), 4)
    scores = CoOccurrence.fit(train, Settings()).scores(rows)
    assert np.argsort(-scores[0], kind="stable").tolist() == [1, 2, 0, 3]
    assert popularity(train).tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize("rule", [SeenRule(False), SeenRule(True), SeenRule(True, left_out=True)])
def test_ranks_against_a_loop_over_the_catalogue(rule):
    rows, lists, targets = random_rows(2, 60, 8)
    scores = np.random.default_rng(3).integers(0, 5, (60, NUM_ITEMS)).astype(float)
    expected, counted = [], []
    for row, (history, target) in enumerate(zip(lists, targets, strict=True)):
        removed = set(history) if rule.removed else set()
        counted.append(0.0 if rule.left_out and target and target in removed else 1.0)
        if target == 0 or target in removed:
            expected.append(NUM_ITEMS + 1)
            continue
        others = [item for item in range(1, NUM_ITEMS + 1) if item != target and item not in removed]
        expected.append(1 + sum(scores[row, item - 1] >= scores[row, target - 1] for item in others))
    ranks, weights = rank_targets(scores, rows, rule)
    assert ranks.tolist() == expected and weights.tolist() == counted
    assert 0.0 in counted or not rule.left_out


def test_all_baselines_of_the_bundled_films(monkeypatch):
    """Popularity agrees with a loop; co-occurrence beats it, with settings of the grid."""
    monkeypatch.setattr(
        baselines,
        "GRID",
        {"distance_power": (1.0,), "recency": (0.8,), "source_power": (0.5,), "target_power": (0.0, 0.25)},
    )
    pipeline = config.prepare("configs/movielens_small_retrieval.config", []).pipeline
    plain, directed, symmetric = baselines.measure(pipeline, "test")
    train = baselines.read(pipeline, "train")
    rows = baselines.read(pipeline, "test")
    counts = np.bincount(train.items, minlength=train.num_items + 1)
    ends = np.cumsum(rows.lengths)
    ranks = []
    for target, end, length in zip(rows.targets, ends, rows.lengths, strict=True):
        as_good = counts >= counts[target]
        as_good[0] = False
        as_good[rows.items[end - length : end]] = False
        as_good[target] = False
        ranks.append(1 + as_good.sum())
    gains = [1 / math.log2(1 + rank) if rank <= 10 else 0 for rank in ranks]
    assert plain.metrics["ndcg@10"] == pytest.approx(np.mean(gains))
    assert plain.metrics["hit_rate@10"] == pytest.approx(np.mean(np.array(ranks) <= 10))
    assert plain.settings is None and not directed.settings.symmetric and symmetric.settings.symmetric
    assert directed.metrics["ndcg@10"] > 3 * plain.metrics["ndcg@10"]
