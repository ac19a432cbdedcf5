"""The blend of a model with co-occurrence against its formula, and its weight against the better of both."""

import numpy as np
import pytest
import torch

from recsys import config
from recsys.evaluation import blend as module
from recsys.evaluation.blend import Blend, Queries
from recsys.evaluation.co_occurrence import Settings
from recsys.evaluation.interactions import Interactions

ROWS, ITEMS, WIDTH, TEMPERATURE = 40, 30, 8, 0.2
METRICS = ["model.retriever.metrics=[{ndcg {k: 10}}]", "train.evaluation.best_metric=ndcg@10"]


class Table:
    """A stand-in for co-occurrence: scores by the first item of each history."""

    def __init__(self, scores: np.ndarray):
        self.table = scores

    def scores(self, rows: Interactions) -> np.ndarray:
        starts = np.cumsum(rows.lengths) - rows.lengths
        return self.table[rows.items[starts] - 1]


@pytest.fixture
def pipeline():
    return config.prepare("configs/movielens_small_retrieval.config", METRICS).pipeline


@pytest.fixture
def split():
    """Rows of one event each; the event of row i is item i modulo ITEMS."""
    generator = np.random.default_rng(3)
    items = np.arange(ROWS) % ITEMS + 1
    targets = (items + generator.integers(1, ITEMS, ROWS) - 1) % ITEMS + 1
    ones = np.ones(ROWS, np.int64)
    rows = Interactions(items, ones, targets, ones, ITEMS)
    vectors = [generator.standard_normal((count, WIDTH)).astype(np.float32) for count in (ROWS, ITEMS)]
    return Queries(rows, *vectors)


def test_scores_follow_the_formula(monkeypatch, split):
    counts = np.random.default_rng(4).random((ITEMS, ITEMS))
    counts[counts < 0.5] = 0
    blend = Blend(Table(counts), Settings(), TEMPERATURE, weight=0.3)
    items, scores = blend.best_items(split, 5, remove_seen=True)
    for row in range(ROWS):
        event = split.rows.items[row] - 1
        p = np.exp(split.items.astype(np.float64) @ split.queries[row] / TEMPERATURE)
        q = counts[event] / counts[event].sum()
        expected = 0.7 * np.log(p / p.sum()) + 0.3 * np.log(q + 1e-6)
        expected[event] = -np.inf
        assert items[row].tolist() == (1 + np.argsort(-expected)[:5]).tolist()
        assert scores[row] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-4)


@pytest.mark.parametrize("better", ["model", "co-occurrence"])
def test_the_weight_follows_the_better_one(monkeypatch, pipeline, split, better):
    """One of the two knows the targets, the other one is wrong about all of them."""
    right, targets = np.zeros((ITEMS, ITEMS)), split.rows.targets - 1
    right[split.rows.items - 1, targets] = 1.0
    wrong = np.zeros((ITEMS, ITEMS))
    wrong[split.rows.items - 1, (targets + 1) % ITEMS] = 1.0
    # The items of the last rows repeat those of the first, with other targets.
    rows = split.rows.select(slice(0, ITEMS))
    knows = right if better == "co-occurrence" else wrong
    vectors = np.eye(ITEMS, dtype=np.float32)
    known = targets if better == "model" else (targets + 2) % ITEMS
    known_split = Queries(rows, vectors[known[:ITEMS]], vectors)
    monkeypatch.setattr(module, "read", lambda pipeline, split: rows)
    monkeypatch.setattr(module, "choose", lambda *args, symmetric: Settings(symmetric))
    monkeypatch.setattr(module.CoOccurrence, "fit", lambda train, settings: Table(knows))
    model = torch.nn.Module()
    model.objective = torch.nn.Module()
    model.objective.loss = torch.nn.Module()
    model.objective.loss.temperature = TEMPERATURE
    blend = Blend.fit(pipeline, model, known_split)
    alone = blend.metrics(pipeline, known_split, [0.0, 1.0])
    chosen = blend.metrics(pipeline, known_split, [blend.weight])[0]["ndcg@10"]
    assert chosen >= max(metrics["ndcg@10"] for metrics in alone)
    assert (blend.weight == 0) == (better == "model")
