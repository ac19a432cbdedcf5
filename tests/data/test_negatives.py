"""The negatives of a retriever's batch, their features and weights, and the file that describes them."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import LayoutRule
from recsys.data.convert.item_catalogue import convert
from recsys.data.hashing import combine
from recsys.data.loader import Loader
from recsys.data.negatives import FrequencySampler, InBatchLogQ, NegativeSampler
from recsys.data.schema.vocabulary import mappings
from recsys.errors import DataError
from recsys.models.retriever import NextItemLoss, RetrieverOutputs

RULE = LayoutRule(num_contextual=0, targets=False)
ITEM_FEATURES = """
features { name: "labels" sides: ITEM id { hash { num_buckets: 11 } multi_valued: true } }
features { name: "shop" sides: ITEM id { vocabulary { file: "%(folder)s/vocabulary/item.parquet" size: 6 } } }
features { name: "price" sides: ITEM numeric { normalize { mean: 2 std: 4 } fill: 2 } }
features { name: "year" sides: ITEM numeric { bucketize { boundaries: [1990, 2000] } } }
data { item_file: "%(folder)s/items.parquet" }
model { retriever {
  item_feature: "item_id"
  item_encoder {}
  loss { softmax { in_batch { num_uniform: 4 } } }
} }
"""


@pytest.fixture
def retriever(sample):
    """Rows, six items, and what is known of them in another order, with an item more."""
    sample.write(sample.rows(30))
    sample.pipeline.model.ClearField("ranker")
    parsed = text_format.Parse(ITEM_FEATURES % {"folder": sample.folder}, pb.Pipeline())
    sample.pipeline.MergeFrom(parsed)
    sample.pipeline = config.resolve(sample.pipeline, read_files=False).pipeline
    sample.items = [
        {
            "item_id": item,
            "labels": list(range(item % 4)),
            "shop": 7 if item % 2 else 8,
            "price": item / 2,
            "year": 1985 + item,
        }
        for item in (99, 3, 50, 4711, 7, 12, 1000000007)
    ]
    sample.items[2]["price"] = None
    write(sample)
    return sample


def write(sample, items=None) -> None:
    types = {"item_id": pa.int64(), "labels": pa.list_(pa.int64()), "shop": pa.int64(), "price": pa.float64()}
    schema = pa.schema({**types, "year": pa.int64()})
    pq.write_table(
        pa.Table.from_pylist(items or sample.items, schema=schema), sample.folder / "items.parquet"
    )


def expected(sample, rows):
    """Computes the columns of rows of the item table from the file, by hand."""
    by_id = {entry["item_id"]: entry for entry in sample.items}
    known = [by_id[sample.vocabulary[row - 1]] for row in rows]
    labels = mappings(sample.pipeline)["labels"]
    return {
        "catalogue_labels": labels.map(
            pa.array([x for entry in known for x in entry["labels"]], pa.int64())
        ).tolist(),
        "labels counts": [len(entry["labels"]) for entry in known],
        # 7 is the second id of the vocabulary, 8 is not in it.
        "catalogue_shop": [2 if entry["shop"] == 7 else 0 for entry in known],
        "catalogue_price": [((2 if entry["price"] is None else entry["price"]) - 2) / 4 for entry in known],
        "catalogue_year": [sum(entry["year"] >= limit for limit in (1990, 2000)) for entry in known],
    }


def negatives_of(batch):
    return {
        **{name: batch.ids[name].values().tolist() for name in ("catalogue_labels", "catalogue_shop")},
        "catalogue_year": batch.ids["catalogue_year"].values().tolist(),
        "labels counts": batch.value_counts["catalogue_labels"].tolist(),
        "catalogue_price": pytest.approx(batch.numbers["catalogue_price"].tolist(), rel=1e-6),
    }


def test_a_training_batch_has_drawn_items_then_its_own_and_what_is_known_of_both(retriever):
    for batch in Loader.open(retriever.pipeline, "train", RULE, mode="train").epoch(0):
        events = batch.ids["uih_item_id"].values()
        items = batch.ids[features.BATCH_ITEMS].values().tolist()
        assert items == sorted(set(events.tolist()) - {0})
        drawn = batch.ids[features.NEGATIVES].values().tolist()
        assert len(drawn) == 4
        assert expected(retriever, drawn + items) == negatives_of(batch)
        for name in (features.NEGATIVES, features.BATCH_ITEMS, "catalogue_labels"):
            values, lengths = batch.ids[name].values(), batch.ids[name].lengths()
            assert len(values) == lengths.sum() and lengths.max() - lengths.min() <= 1


def test_evaluation_has_the_whole_catalogue_and_no_weights(retriever):
    batch = next(Loader.open(retriever.pipeline, "train", RULE, mode="evaluate").epoch(0))
    assert batch.ids[features.NEGATIVES].values().tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.ids[features.BATCH_ITEMS].values().tolist() == []
    assert expected(retriever, range(1, 7)) == negatives_of(batch)
    assert features.LOG_WEIGHTS not in batch.numbers


def test_prediction_needs_no_file(retriever):
    (retriever.folder / "items.parquet").unlink()
    batch = next(Loader.open(retriever.pipeline, "train", RULE, mode="predict").epoch(0))
    assert batch.ids["catalogue_labels"].values().tolist() == []
    with pytest.raises(DataError, match=r"items.parquet: no such file \(data.item_file\)"):
        Loader.open(retriever.pipeline, "train", RULE, mode="train")


def test_log_weights_are_the_expected_number_of_an_item_among_the_negatives(retriever):
    counts = [6, 5, 4, 3, 2, 1]  # of the vocabulary file
    for batch in Loader.open(retriever.pipeline, "train", RULE, mode="train").epoch(0):
        items = [
            *batch.ids[features.NEGATIVES].values().tolist(),
            *batch.ids[features.BATCH_ITEMS].values().tolist(),
        ]
        events = len(batch.ids["uih_item_id"].values())
        wanted = [-math.log(4 / 6 + 1 - (1 - counts[row - 1] / sum(counts)) ** events) for row in items]
        assert batch.numbers[features.LOG_WEIGHTS].tolist() == pytest.approx(wanted, rel=1e-5)


def test_weighted_negatives_add_up_to_the_catalogue():
    """Over many batches the sum of weights x value is that of all items: the correction is unbiased."""
    random = np.random.default_rng(0)
    counts, values = np.array([0, 400, 50, 10, 1, 0]), random.uniform(0.5, 2, 5)
    weights = InBatchLogQ(counts, num_drawn=3)
    share = np.maximum(counts[1:], 1) / counts.sum()
    sums = []
    for _ in range(20_000):
        seen = np.unique(random.choice(5, size=30, p=share / share.sum()))
        rows = np.concatenate([random.integers(0, 5, 3), seen]) + 1
        sums.append((np.exp(weights.log_weights(rows, 30)) * values[rows - 1]).sum())
    assert np.mean(sums) == pytest.approx(values.sum(), rel=0.01)


def test_no_item_is_weighted_as_impossible():
    assert np.isfinite(InBatchLogQ(np.array([0, 0, 5]), num_drawn=0).log_weights(np.array([1, 2]), 1)).all()


def choose(sample, negatives: str) -> None:
    softmax = sample.pipeline.model.retriever.loss.softmax
    softmax.Clear()
    text_format.Parse(negatives, softmax)


def test_frequent_items_are_drawn_in_proportion_to_a_power_of_their_events(retriever):
    for power in (1.0, 0.5, 0.0):
        choose(retriever, f"frequency {{ num_negatives: 600 power: {power} }}")
        drawn = NegativeSampler.open(retriever.pipeline, "train")
        rows = np.concatenate([drawn.draw(0, batch) for batch in range(100)])
        # 60,000 draws; the counts of the vocabulary file are 6 to 1.
        weights = np.arange(6, 0, -1.0) ** power
        expected = 60_000 * weights / weights.sum()
        assert (abs(np.bincount(rows, minlength=7)[1:] - expected) < 5 * np.sqrt(expected)).all()
        assert rows.min() == 1 and rows.max() == 6
    assert (
        drawn.draw(3, 17).tolist() == NegativeSampler.open(retriever.pipeline, "train").draw(3, 17).tolist()
    )


def test_frequent_negatives_are_weighed_by_their_expected_number(retriever):
    choose(retriever, "frequency { num_negatives: 5 power: 2 }")
    squares = {row: (7 - row) ** 2 for row in range(1, 7)}
    for batch in Loader.open(retriever.pipeline, "train", RULE, mode="train").epoch(0):
        rows = batch.ids[features.NEGATIVES].values().tolist()
        wanted = [-math.log(5 * squares[row] / sum(squares.values())) for row in rows]
        assert batch.numbers[features.LOG_WEIGHTS].tolist() == pytest.approx(wanted, rel=1e-5)


def test_drawn_and_weighed_frequent_items_add_up_to_the_catalogue():
    values = np.random.default_rng(0).uniform(0.5, 2, 5)
    frequencies = FrequencySampler(np.array([0, 400, 50, 10, 1, 0]), power=0.75, num_drawn=10**6)
    rows = frequencies.draw(combine(0, np.arange(10**6)))
    total = (np.exp(frequencies.log_weights(rows)) * values[rows - 1]).sum()
    assert total == pytest.approx(values.sum(), rel=0.015)


@pytest.mark.parametrize(
    "negatives",
    [
        "full {}",
        "uniform { num_negatives: 3 }",
        "in_batch { num_uniform: 3 }",
        "in_batch { num_uniform: 3 log_q: false }",
        "frequency { num_negatives: 3 }",
        "frequency { num_negatives: 3 log_q: false }",
    ],
)
def test_batches_of_all_kinds_of_negatives_fit_the_loss(retriever, negatives):
    """The reader's negatives and weights as the model compares with them."""
    loss = retriever.pipeline.model.retriever.loss
    loss.softmax.Clear()
    text_format.Parse(negatives, loss.softmax)
    torch.manual_seed(0)
    seen = 0
    for batch in Loader.open(retriever.pipeline, "train", RULE, mode="train").epoch(0):
        num_events = len(batch.uih_timestamps)
        shared = [batch.ids[name].values() for name in features.shared_columns(retriever.pipeline)]
        vectors = [
            torch.randn(n, 4) for n in (num_events, len(shared[0]), *(len(item) for item in shared[1:]))
        ]
        outputs = RetrieverOutputs(*vectors, *([torch.empty(0, 4)] if len(vectors) == 2 else []))
        objective = NextItemLoss(loss, "uih_item_id", num_items=6, l2_normalize=True, weight_column="")
        losses = objective(outputs, batch)
        assert losses.sums.isfinite().all()
        seen += int(losses.counts)
        drawn = losses.sums.item()
        batch.numbers.pop(features.LOG_WEIGHTS, None)
        weighed = negatives.startswith(("in_batch", "frequency")) and "log_q" not in negatives
        assert (objective(outputs, batch).sums.item() != drawn) == (weighed and int(losses.counts) > 0)
    assert seen > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda items: items[1:],
            "items.parquet: 1 of the 6 items of .*item.parquet are missing, the first is 99",
        ),
        (
            lambda items: [*items, items[4]],
            "items.parquet: 1 of the 6 items of .* occur twice, the first is 7",
        ),
        (
            lambda items: [items[0], {**items[0], "item_id": None}, *items],
            "items.parquet, row 1: item_id is null, 1 in all; each row is an item. The preparation tools",
        ),
        (lambda items: [{**items[0], "year": None}, *items[1:]], "items.parquet, row 0: year is null"),
        (lambda items: [{**items[0], "labels": None}, *items[1:]], "row 0: labels is null. An empty list is"),
    ],
)
def test_a_file_that_does_not_describe_the_catalogue_is_refused(retriever, change, message):
    write(retriever, change(retriever.items))
    with pytest.raises(DataError, match=message) as error:
        Loader.open(retriever.pipeline, "train", RULE, mode="train")
    assert "SKIP" not in str(error.value)


def test_a_missing_column_is_named(retriever):
    table = pq.read_table(retriever.folder / "items.parquet")
    pq.write_table(table.drop(["shop"]), retriever.folder / "items.parquet")
    with pytest.raises(DataError, match="items.parquet: no column shop; it has item_id, labels, price, year"):
        Loader.open(retriever.pipeline, "train", RULE, mode="train")
    with pytest.raises(DataError, match="items: no column shop"):
        convert(retriever.pipeline, table.drop(["shop"]), mappings(retriever.pipeline), "items")


def test_weights_need_counts(retriever):
    path = retriever.folder / "vocabulary" / "item.parquet"
    pq.write_table(pq.read_table(path).drop(["count"]), path)
    for chosen in ("in_batch {}", "frequency { log_q: false }"):
        choose(retriever, chosen)
        with pytest.raises(DataError, match="item.parquet: no column count; it has id. Negatives are"):
            Loader.open(retriever.pipeline, "train", RULE, mode="train")
    for chosen in ("in_batch { log_q: false }", "uniform {}"):
        choose(retriever, chosen)
        Loader.open(retriever.pipeline, "train", RULE, mode="train")
