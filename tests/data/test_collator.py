"""Shared negatives of a retriever's batches, and how a batch reaches TorchRec."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.negatives import NegativeSampler

RULE = LayoutRule(num_contextual=0, targets=False)


@pytest.fixture
def retriever(sample):
    """The sample's files, read for next-item retrieval."""
    sample.write(sample.rows(30))
    sample.pipeline.model.retriever.item_feature = "item_id"
    sample.pipeline.model.retriever.loss.softmax.full.SetInParent()
    return sample


def test_the_whole_catalogue_without_the_unknown_row(retriever):
    for mode in ("train", "evaluate", "predict"):
        for batch in Loader.open(retriever.pipeline, "train", RULE, mode=mode).epoch(0):
            negatives = batch.ids[features.NEGATIVES]
            assert negatives.values().tolist() == [1, 2, 3, 4, 5, 6]
            # No row has more than its share: FBGEMM buckets the ids of a row one after the other.
            lengths = negatives.lengths().tolist()
            assert sum(lengths) == 6 and max(lengths) == math.ceil(6 / len(batch.request_time))
            assert list(batch.ids.keys())[-1] == features.NEGATIVES


def test_candidates_are_no_tokens(retriever):
    batch = next(Loader.open(retriever.pipeline, "train", RULE, mode="evaluate").epoch(0))
    assert torch.equal(batch.layout.lengths, batch.uih_lengths) and batch.layout.total_targets == 0
    assert batch.num_candidates.sum() == len(batch.candidate_timestamps) > 0


def uniform(pipeline, count: int, seed: int = 1) -> NegativeSampler:
    pipeline.model.retriever.loss.softmax.uniform.num_negatives = count
    pipeline.train.seed = seed
    return NegativeSampler.open(pipeline, "train")


def test_uniform_negatives_depend_on_seed_epoch_and_batch_only(retriever):
    draws = uniform(retriever.pipeline, 20)
    first = draws.draw(3, 17).tolist()
    draws.draw(0, 0)
    assert draws.draw(3, 17).tolist() == first == uniform(retriever.pipeline, 20).draw(3, 17).tolist()
    others = [draws.draw(4, 17), draws.draw(3, 18), uniform(retriever.pipeline, 20, seed=2).draw(3, 17)]
    assert all(draw.tolist() != first for draw in others)


def test_uniform_negatives_are_uniform(retriever):
    counts = Counter(
        np.concatenate([uniform(retriever.pipeline, 600).draw(0, i) for i in range(100)]).tolist()
    )
    # 60,000 draws of 6 items: 10,000 each, standard deviation 91.
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
    assert max(abs(count - 10_000) for count in counts.values()) < 5 * 91


def test_uniform_negatives_are_for_training(retriever):
    uniform(retriever.pipeline, 20)
    train, evaluate = (
        next(Loader.open(retriever.pipeline, "train", RULE, mode=m).epoch(0)) for m in ("train", "evaluate")
    )
    assert train.ids[features.NEGATIVES].values().numel() == 20
    assert evaluate.ids[features.NEGATIVES].values().tolist() == [1, 2, 3, 4, 5, 6]


def test_an_embedding_collection_reads_the_ids(retriever):
    tables = [
        EmbeddingConfig(name=t.name, num_embeddings=t.rows, embedding_dim=4, feature_names=list(t.columns))
        for t in features.tables(retriever.pipeline)
    ]
    collection = EmbeddingCollection(tables=tables)
    batch = next(Loader.open(retriever.pipeline, "train", RULE, mode="evaluate").epoch(0))
    actual = collection(batch.ids)
    weights = collection.embeddings["item"].weight
    assert torch.equal(actual["uih_item_id"].values(), weights[batch.ids["uih_item_id"].values()])
    assert torch.equal(actual[features.NEGATIVES].values(), weights[1:])


def test_a_batch_moves_as_a_whole(retriever):
    batch = next(Loader.open(retriever.pipeline, "train", RULE, mode="predict").epoch(0))
    moved = batch.to(torch.device("meta"))
    assert moved.uih_timestamps.is_meta and moved.ids.values().is_meta and moved.layout.lengths.is_meta
    assert moved.rows is batch.rows and moved.position == batch.position
    assert isinstance(moved.rows.keys, pa.Table) and isinstance(retriever.pipeline, pb.Pipeline)
