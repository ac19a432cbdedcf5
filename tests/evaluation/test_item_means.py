"""The mean label of each item as a baseline for rankers, against loops over candidates."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys import baseline
from recsys.evaluation.item_means import SMOOTHING, Candidates, choose, predictions


def pairs_auc(score, truth):
    wins = [
        (score[i] > score[j]) + (score[i] == score[j]) / 2
        for i in range(len(score))
        for j in range(len(score))
        if truth[i] > truth[j]
    ]
    return sum(wins) / len(wins)


def candidates(items, labels):
    return Candidates(
        np.array(items),
        {"click": np.array(labels, np.float32)},
        {"click": np.ones(len(items), np.float32)},
        np.zeros(len(items), np.int64),
    )


def test_predictions_are_smoothed_means_by_hand():
    train = candidates([1, 1, 2, 1, 2, 3], [1, 1, 0, 0, 0, 1])
    # Items 9 and 0 have no training rows, so they have the mean of all, 1/2.
    actual = predictions(train, np.array([1, 2, 3, 9, 0]), "click", 10)
    assert actual == pytest.approx([(2 + 5) / 13, 5 / 12, 6 / 11, 0.5, 0.5])


def test_candidates_that_a_task_does_not_count_are_left_out():
    train = candidates([1, 1, 2, 1, 2, 3], [1, 1, 0, 0, 0, 1])
    train.weights["click"][[1, 2, 5]] = 0
    # Item 1 has the labels 1 and 0, item 2 has 0, item 3 none; the mean of all is 1/3.
    actual = predictions(train, np.array([1, 2, 3]), "click", 10)
    assert actual == pytest.approx([(1 + 10 / 3) / 12, (10 / 3) / 11, 1 / 3])


@pytest.mark.parametrize("kind", ["binary", "regression"])
def test_the_smoothing_is_the_best_on_validation_rows(kind):
    generator = np.random.default_rng(0)
    items, labels = generator.integers(0, 9, (2, 150)), generator.integers(0, 2, (2, 150))
    train, tuning = candidates(items[0], labels[0]), candidates(items[1], labels[1])
    values = []
    for k in SMOOTHING:
        actual = predictions(train, tuning.items, "click", k)
        loss = np.mean((actual - labels[1]) ** 2)
        values.append(pairs_auc(actual.astype(np.float32), labels[1]) if kind == "binary" else -loss)
    assert choose(train, tuning, "click", kind) == SMOOTHING[int(np.argmax(values))]


def test_the_command_measures_the_bundled_sample(capsys):
    """The AUC of clicks against all pairs, with item means counted in Python from the files."""
    assert baseline.main(["--config", "configs/quickstart.config", "--json"]) == 0
    means, mean = json.loads(capsys.readouterr().out)["baselines"]
    smoothing, sums, counts = means["settings"]["is_click"], {}, {}
    train = pq.read_table(
        "tests/data/kuairand/train.parquet", columns=["candidate_item_id", "candidate_is_click"]
    )
    for row in train.to_pylist():
        for item, label in zip(*row.values(), strict=True):
            sums[item], counts[item] = sums.get(item, 0) + label, counts.get(item, 0) + 1
    base = sum(sums.values()) / sum(counts.values())
    score, truth = [], []
    test = pq.read_table("tests/data/kuairand/test.parquet", columns=train.column_names)
    for row in test.to_pylist():
        # The config evaluates the first 10 candidates of a row.
        for item, label in list(zip(*row.values(), strict=True))[:10]:
            score.append((sums.get(item, 0) + smoothing * base) / (counts.get(item, 0) + smoothing))
            truth.append(label)
    score, truth = np.array(score, np.float32), np.array(truth)
    difference = score[truth == 1][:, None] - score[truth == 0][None, :]
    auc = float(((difference > 0) + 0.5 * (difference == 0)).mean())
    assert means["metrics"]["is_click/auc"] == pytest.approx(auc, abs=1e-6)
    assert mean["metrics"]["is_click/auc"] == 0.5
    rate = truth.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    loss = -np.mean(truth * np.log(base) + (1 - truth) * np.log(1 - base))
    assert mean["metrics"]["is_click/normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-5)


def test_a_config_without_test_rows_is_a_finding(capsys):
    flags = ["--config", "configs/quickstart.config", "--set", "data.test="]
    assert baseline.main(flags) == 2
    assert "data.test: absent" in capsys.readouterr().err
