"""The order of ids in a table: a bijection that deals frequent ids out evenly to all blocks of rows."""

import numpy as np
import pyarrow as pa
import pytest

from recsys import protos as pb
from recsys.data.schema.row_layout import ShardedRowLayout
from recsys.data.schema.vocabulary import Vocabulary, fingerprints, mappings

COUNTS = [1, 2, 3, 4, 7, 12, 144, 1000, 1024, 3883, 9125, 50_000]


@pytest.mark.parametrize("table", [None, "item_id", "tag"])
@pytest.mark.parametrize("count", COUNTS)
def test_every_row_but_the_unknown_one_has_one_id(count, table):
    order = ShardedRowLayout(count, table)
    rows = order.row_of(np.arange(count))
    assert sorted(rows.tolist()) == list(range(1, count + 1))
    assert table or rows.tolist() == list(range(1, count + 1))
    assert order.id_of(rows).tolist() == list(range(count))
    assert order.id_of(np.array([0])).tolist() == [-1]


def test_no_ids():
    order = ShardedRowLayout(0, "t")
    assert order.row_of(np.arange(0)).tolist() == [] and order.id_of(np.array([0])).tolist() == [-1]


def test_large_counts_do_not_wrap_around():
    count = 3_000_000_000
    order = ShardedRowLayout(count, "t")
    places = np.array([0, 1, 2, 1_234_567_891, count - 1])
    # Python's integers have no end.
    assert order.row_of(places).tolist() == [
        1 + (order.start + int(place) * order.step) % count for place in places
    ]
    assert order.id_of(order.row_of(places)).tolist() == places.tolist()
    with pytest.raises(ValueError, match="a vocabulary has at most 3000000000 ids"):
        ShardedRowLayout(2**32, "t")


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("count", [3883, 9125, 50_000, 1_000_003])
def test_every_block_of_rows_has_its_share_of_the_first_ids(count, ranks):
    """TorchRec cuts a table row-wise into blocks of ceil(rows / ranks)."""
    rows = ShardedRowLayout(count, "t").row_of(np.arange(count))
    block = -(-(count + 1) // ranks)
    for first in (4 * ranks, 16 * ranks, count // 4):
        # With ids spread at random, blocks would have 4, 16, ... ids with deviations of 2, 4, ... from that.
        assert np.bincount(rows[:first] // block).max() <= 1.02 * first / ranks + 3, first
        assert np.bincount((1 + np.arange(first)) // block).max() > 1.9 * first / ranks


@pytest.mark.parametrize("ids", [[5, 7, 9, 11, 13], [10**15, 3, 77, 5 * 10**17], ["a", "b", "", "dd"]])
def test_a_vocabulary_of_a_sharded_table(ids):
    text = isinstance(ids[0], str)
    kind, stranger = (pa.string(), "zz") if text else (pa.int64(), 8)
    vocabulary = Vocabulary(pa.array(ids, kind), name="v", table="t")
    expected = dict(
        zip(ids, ShardedRowLayout(len(ids), "t").row_of(np.arange(len(ids))).tolist(), strict=True)
    )
    queries = [*ids[::-1], stranger, *ids]
    rows = vocabulary.map(pa.array(queries, kind))
    assert rows.tolist() == [expected.get(query, 0) for query in queries] and rows.dtype == np.int64
    assert vocabulary.original(rows).to_pylist() == [None if q == stranger else q for q in queries]


def test_only_sharded_tables_are_spread(sample):
    pipeline = sample.pipeline
    listed = mappings(pipeline)["item"].map(pa.array(sample.vocabulary)).tolist()
    assert listed == list(range(1, 7))
    before = fingerprints(pipeline)
    pipeline.model.embedding.placement = pb.Embedding.SHARDED
    spread = mappings(pipeline)["item"].map(pa.array(sample.vocabulary)).tolist()
    assert sorted(spread) == listed and spread != listed
    assert fingerprints(pipeline)["item"] != before["item"]


def test_tables_of_one_size_begin_in_different_rows():
    first = {int(ShardedRowLayout(1000, f"table_{i}").row_of(np.array([0]))[0]) for i in range(100)}
    assert len(first) > 90
