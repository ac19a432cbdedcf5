"""Baselines beside evaluations, against the script that shares no code with the package."""

import json
from pathlib import Path

import pytest

from recsys import config
from recsys.evaluation import reference
from recsys.evaluation.reference import measure_reference
from scripts.popularity_baseline import retrieval_baseline

FOLDER = Path("tests/data/movielens")


def test_popularity_is_that_of_the_script():
    pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
    measured = measure_reference(pipeline)
    schema = json.loads((FOLDER / "schema.json").read_text())
    expected = retrieval_baseline(FOLDER, schema, "validation", 10**6)
    assert measured.skipped == ""
    for metric in ("hit_rate@10", "hit_rate@50", "ndcg@10", "mrr"):
        assert measured.metrics["popularity"][metric] == pytest.approx(expected[metric], abs=1e-6)
    assert measured.metrics["co-occurrence"]["ndcg@10"] > 3 * measured.metrics["popularity"]["ndcg@10"]


def test_large_data_and_rankers_have_no_reference(monkeypatch):
    pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
    monkeypatch.setattr(reference, "MOST_ROWS", 670)
    measured = measure_reference(pipeline)
    assert measured.metrics == {}
    assert measured.skipped.startswith("671 training rows")
    ranker = config.prepare("configs/quickstart.config").pipeline
    assert measure_reference(ranker) == ({}, "")
