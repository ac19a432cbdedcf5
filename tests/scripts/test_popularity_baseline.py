"""The popularity baseline against loops over pairs and over the catalogue."""

import json
import math
import random

import numpy as np
import polars as pl
import pytest

from scripts import popularity_baseline as baseline


def pairs_auc(score, truth):
    wins = [
        (score[i] > score[j]) + (score[i] == score[j]) / 2
        for i in range(len(score))
        for j in range(len(score))
        if truth[i] > truth[j]
    ]
    return sum(wins) / len(wins) if wins else math.nan


def test_auc_and_gauc_against_pairs():
    generator = np.random.default_rng(0)
    score, truth = generator.integers(0, 9, 120) / 8.0, generator.integers(0, 2, 120).astype(float)
    user = generator.integers(0, 30, 120)
    assert baseline.auc(score, truth) == pytest.approx(pairs_auc(score, truth))
    assert math.isnan(baseline.auc(score, np.ones(120)))
    parts = [(pairs_auc(score[user == u], truth[user == u]), (user == u).sum()) for u in np.unique(user)]
    parts = [(value, weight) for value, weight in parts if not math.isnan(value)]
    expected = sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)
    assert baseline.gauc(score, truth, user) == pytest.approx(expected)
    texts = np.array([f"user {u}" for u in user], dtype=object)
    assert baseline.gauc(score, truth, texts) == pytest.approx(expected)
    assert math.isnan(baseline.gauc(score, truth, np.arange(120)))


def write(folder, schema, **splits):
    schema["splits"] = {name: {"files": [f"{name}.parquet"]} for name in splits}
    (folder / "schema.json").write_text(json.dumps(schema))
    for name, columns in splits.items():
        pl.DataFrame(columns).write_parquet(folder / f"{name}.parquet")


def test_ranking_scores_items_by_their_smoothed_training_mean(tmp_path):
    schema = {"task": "ranking", "labels": {"click": "binary", "seconds": "regression"}}
    train = {
        "user_id": [1, 2, 3],
        "candidate_item_id": [[1, 1, 2], [1, 2], [3]],
        "candidate_click": [[1.0, 1.0, 0.0], [0.0, 0.0], [1.0]],
        "candidate_seconds": [[4.0, 8.0, 1.0], [0.0, 2.0], [6.0]],
    }
    judged = {
        "user_id": [1, 1, 2],
        "candidate_item_id": [[1, 2], [3, 9], [2]],
        "candidate_click": [[1.0, 0.0], [1.0, 0.0], [1.0]],
        "candidate_seconds": [[3.0, 1.0], [7.0, 2.0], [1.0]],
    }
    write(tmp_path, schema, train=train, validation=judged, test=judged)
    found = baseline.ranking_baseline(tmp_path, schema, "test")
    k = found["click/smoothing"]
    score = np.array(
        [(2 + k / 2) / (3 + k), (0 + k / 2) / (2 + k), (1 + k / 2) / (1 + k), 0.5, (k / 2) / (2 + k)]
    )
    truth = np.array([1.0, 0, 1, 0, 1])
    assert found["click/auc"] == pytest.approx(pairs_auc(score, truth))
    assert found["click/gauc"] == pytest.approx(pairs_auc(score[:4], truth[:4]))
    loss = -np.mean(truth * np.log(score) + (1 - truth) * np.log(1 - score))
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert found["click/normalized_entropy"] == pytest.approx(loss / entropy)
    assert found["click/auc of exposure"] == pytest.approx(pairs_auc([3, 2, 1, 0, 2], truth))
    seconds, k = np.array([3.0, 1, 7, 2, 1]), found["seconds/smoothing"]
    mean = np.array([(12 + 3.5 * k) / (3 + k), (3 + 3.5 * k) / (2 + k), (6 + 3.5 * k) / (1 + k), 3.5, 0])
    mean[4] = mean[1]
    assert found["seconds/mae"] == pytest.approx(np.abs(mean - seconds).mean())
    assert found["seconds/mse of the mean"] == pytest.approx(((3.5 - seconds) ** 2).mean())


def test_retrieval_ranks_the_whole_catalogue_without_the_history_ties_against_us(tmp_path):
    generator = random.Random(0)
    catalogue = list(range(30))
    histories = [generator.sample(catalogue, generator.randrange(12)) for _ in range(20)]
    targets = [generator.choice([item for item in catalogue if item not in set(h)]) for h in histories]
    write(
        tmp_path,
        {"task": "retrieval"},
        train={"uih_item_id": histories},
        test={"uih_item_id": histories, "candidate_item_id": [[target] for target in targets]},
    )
    (tmp_path / "vocabulary").mkdir()
    pl.DataFrame({"id": catalogue}).write_parquet(tmp_path / "vocabulary" / "item_id.parquet")
    counts = {item: sum(item in history for history in histories) for item in catalogue}
    ranks = []
    for history, target in zip(histories, targets, strict=True):
        others = [i for i in catalogue if i != target and i not in history[-5:]]
        ranks.append(1 + sum(counts[item] >= counts[target] for item in others))
    schema = json.loads((tmp_path / "schema.json").read_text())
    found = baseline.retrieval_baseline(tmp_path, schema, "test", 5)
    assert found["hit_rate@10"] == pytest.approx(np.mean([rank <= 10 for rank in ranks]))
    assert found["ndcg@10"] == pytest.approx(np.mean([1 / math.log2(1 + r) if r <= 10 else 0 for r in ranks]))
    assert found["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_a_folder_that_no_tool_made_is_refused(tmp_path, capsys):
    assert baseline.main(["--data", str(tmp_path)]) == 2
    assert "schema.json: no such file" in capsys.readouterr().err
