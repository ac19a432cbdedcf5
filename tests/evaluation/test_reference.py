"""Baselines beside evaluations, against loops over the files."""

import math
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from recsys import config
from recsys.evaluation import reference
from recsys.evaluation.reference import measure_reference
from tests.tools.forks import run_ranks

FOLDER = Path("tests/data/movielens")


def popularity_ranks(split):
    """Ranks of the targets by training events, the whole history removed, ties against the target."""
    items = pq.read_table(FOLDER / "vocabulary" / "item_id.parquet")["id"].to_pylist()
    counts = dict.fromkeys(items, 0)
    for history in pq.read_table(FOLDER / "train.parquet")["uih_item_id"].to_pylist():
        for item in history:
            counts[item] += 1
    ordered, ranks = np.sort(list(counts.values())), []
    for row in pq.read_table(
        FOLDER / f"{split}.parquet", columns=["uih_item_id", "candidate_item_id"]
    ).to_pylist():
        (target,), seen = row["candidate_item_id"], set(row["uih_item_id"])
        as_good = len(ordered) - np.searchsorted(ordered, counts[target], side="left")
        ranks.append(as_good - sum(counts[item] >= counts[target] for item in seen))
    return ranks


def test_popularity_is_that_of_the_files():
    pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
    measured = measure_reference(pipeline)
    ranks = popularity_ranks("validation")
    gains = [1 / math.log2(1 + rank) if rank <= 10 else 0 for rank in ranks]
    assert measured.skipped == ""
    popularity = measured.metrics["popularity"]
    assert popularity["hit_rate@50"] == pytest.approx(np.mean(np.array(ranks) <= 50), abs=1e-6)
    assert popularity["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert popularity["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-6)
    assert measured.metrics["co-occurrence"]["ndcg@10"] > 3 * popularity["ndcg@10"]


def measure_on_rank_0(rank, folder, expected):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if rank == 0:
        pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
        assert measure_reference(pipeline).metrics["popularity"] == expected
    dist.barrier()
    dist.destroy_process_group()


def test_rank_0_needs_no_answer_from_the_others(tmp_path):
    pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
    run_ranks(measure_on_rank_0, str(tmp_path), measure_reference(pipeline).metrics["popularity"])


def test_large_data_and_rankers_have_no_reference(monkeypatch):
    pipeline = config.prepare("configs/movielens_small_retrieval.config").pipeline
    monkeypatch.setattr(reference, "MOST_ROWS", 670)
    measured = measure_reference(pipeline)
    assert measured.metrics == {}
    assert measured.skipped.startswith("671 training rows")
    ranker = config.prepare("configs/quickstart.config").pipeline
    assert measure_reference(ranker) == ({}, "")
