"""Made-up rows keep the contract of real ones and are the same each time."""

import pickle

import numpy as np
import pytest

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.sources import open_source

RULE = LayoutRule(num_contextual=2, targets=True)


def source(**settings) -> pb.Source:
    return pb.Source(synthetic=pb.SyntheticSource(**{"num_rows": 1500, "max_history_len": 12, **settings}))


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_every_row_passes_the_checks(sample, mode):
    sample.pipeline.data.batch_size = 100
    sample.pipeline.data.max_history_len = 12
    rows = [
        row
        for b in Loader.open(sample.pipeline, source(), RULE, mode=mode).epoch(0)
        for row in b.rows.row.tolist()
    ]
    assert sorted(rows) == list(range(1500))


def test_the_same_rows_each_time_and_in_each_process(sample):
    first, second = (open_source(source(seed=3), sample.pipeline) for _ in range(2))
    columns = first.check(sample.pipeline, "train")
    rows = first.read(0, 1, columns)
    assert rows.num_rows == 1500 - 1024
    assert rows.equals(pickle.loads(pickle.dumps(second)).read(0, 1, columns))  # noqa: S301 - made here
    assert not rows.equals(open_source(source(seed=4), sample.pipeline).read(0, 1, columns))


def test_lengths_are_uniform_and_ids_follow_a_power_law(sample):
    opened = open_source(source(num_rows=5000, max_candidates=4), sample.pipeline)
    tables = [
        opened.read(0, i, ["uih_item_id", "candidate_item_id"]) for i in range(len(opened.files[0].rows))
    ]
    lengths = [len(x) for t in tables for x in t["uih_item_id"].to_pylist()]
    counts = np.bincount(lengths)
    # 13 lengths, 385 rows each, standard deviation 19.
    assert len(counts) == 13 and abs(counts - 5000 / 13).max() < 5 * 19
    candidates = [len(x) for t in tables for x in t["candidate_item_id"].to_pylist()]
    assert set(candidates) == {1, 2, 3, 4}
    items = [item for t in tables for row in t["uih_item_id"].to_pylist() for item in row]
    shares = [items.count(item) for item in sample.vocabulary]
    assert set(items) == set(sample.vocabulary[:5]) | (set(items) & {sample.vocabulary[5]})
    assert shares == sorted(shares, reverse=True)


def test_lengths_may_follow_a_power_law(sample):
    settings = {"num_rows": 1024, "min_history_len": 1, "max_history_len": 12, "history_len_exponent": 1.2}
    table = open_source(source(**settings), sample.pipeline).read(0, 0, ["uih_item_id"])
    counts = np.bincount([len(row) for row in table["uih_item_id"].to_pylist()], minlength=13)
    weights = [n**-1.2 for n in range(1, 13)]
    expected = 1024 * np.array([0, *weights]) / sum(weights)
    assert (abs(counts - expected) < 5 * np.sqrt(expected) + 1e-9).all()


def test_lengths_may_have_a_lower_end(sample):
    settings = {"min_history_len": 12, "min_candidates": 2, "max_candidates": 3}
    table = open_source(source(num_rows=200, **settings), sample.pipeline).read(
        0, 0, ["uih_item_id", "candidate_item_id"]
    )
    assert {len(x) for x in table["uih_item_id"].to_pylist()} == {12}
    assert {len(x) for x in table["candidate_item_id"].to_pylist()} == {2, 3}
