"""Weights of losses, from files to batches."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from google.protobuf import text_format

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.errors import DataError
from tests.modules.pipelines import RETRIEVER, pipeline_of

RULE = LayoutRule(num_contextual=2, targets=True)
TYPES = {"importance": pa.float64(), "candidate_value": pa.list_(pa.float32())}


@pytest.fixture
def weighted(sample):
    """One task with a weight a row, one with a weight a candidate."""
    by_row, by_candidate = sample.pipeline.model.ranker.tasks
    by_row.weight_column, by_candidate.weight_column = TYPES
    return sample


def write(sample, change=None, types=TYPES) -> list[dict]:
    rows = sample.rows(30)
    for i, row in enumerate(rows):
        row["importance"] = i / 4
        row["candidate_value"] = [i + j / 2 for j in range(len(row["candidate_item_id"]))]
    if change:
        change(rows[7])
    schema = sample.schema
    for name, kind in types.items():
        schema = schema.append(pa.field(name, kind))
    sample.write(rows, schema=schema)
    return rows


def load(sample, mode="train", source="train"):
    return list(Loader.open(sample.pipeline, source, RULE, mode=mode).epoch(0))


@pytest.mark.parametrize("cut", [None, 1])
def test_from_a_file_to_the_batch(weighted, cut):
    if cut:
        weighted.pipeline.data.max_candidates = cut
    rows = write(weighted)
    seen = 0
    for batch in load(weighted):
        parts = batch.weights["candidate_value"].split(batch.num_candidates.tolist())
        for row, weight, many in zip(
            batch.rows.row.tolist(), batch.weights["importance"], parts, strict=True
        ):
            assert weight.item() == (rows[row]["importance"] if row >= 0 else 0)
            assert many.tolist() == (rows[row]["candidate_value"][:cut] if row >= 0 else [])
            seen += row >= 0
    assert seen == 30


def test_prediction_does_not_read_weights(weighted):
    weighted.write(weighted.rows(6))
    assert load(weighted, "predict")[0].weights == {}


def test_a_label_can_be_the_weight_of_another_task(sample):
    click, watch = sample.pipeline.model.ranker.tasks
    click.weight_column = watch.label
    sample.write(sample.rows(8))
    for batch in load(sample):
        assert torch.equal(batch.weights[watch.label], batch.labels["watch"])


def test_synthetic_rows_have_weights(weighted):
    source = pb.Source(synthetic=pb.SyntheticSource(num_rows=20))
    assert all(
        (values >= 0).all() for batch in load(weighted, source=source) for values in batch.weights.values()
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("importance", -0.5, "row 7: importance is -0.5; weights are 0 or larger"),
        ("importance", math.nan, "row 7: importance is nan; NaN and infinities have no meaning here"),
        ("importance", None, "row 7: importance is null"),
        ("candidate_value", [math.inf], r"row 7: candidate_value\[0\] is inf; NaN and infinities"),
        ("candidate_value", [-1.0], r"row 7: candidate_value\[0\] is -1.0; weights are 0 or larger"),
        ("candidate_value", [1.0, 1.0], "row 7: candidate_value has 2 items, candidate_item_id has 1"),
    ],
)
def test_what_is_no_weight_is_named(weighted, column, value, message):
    write(weighted, lambda row: row.update({column: value}))
    with pytest.raises(DataError, match=f"train.parquet, {message}"):
        load(weighted)


def test_a_label_that_is_no_weight_is_named(sample):
    """The regression itself would take this label, so the check of weights has to find it."""
    click, watch = sample.pipeline.model.ranker.tasks
    watch.loss.mean_squared_error.log1p = False
    click.weight_column = watch.label
    rows = sample.rows(8)
    rows[7]["candidate_seconds"] = [-3.0]
    sample.write(rows)
    with pytest.raises(DataError, match=r"row 7: candidate_seconds\[0\] is -3.0; weights are 0 or larger"):
        load(sample)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"importance": pa.float64()}, "no column candidate_value"),
        (TYPES | {"importance": pa.string()}, "column importance is string; it must be number"),
        (TYPES | {"candidate_value": pa.float64()}, "candidate_value is double; it must be list of number"),
    ],
)
def test_columns_that_are_missing_or_of_another_type(weighted, types, message):
    rows = [dict.fromkeys(types) | row for row in weighted.rows(3)]
    schema = weighted.schema
    for name, kind in types.items():
        schema = schema.append(pa.field(name, kind))
    weighted.write(rows, schema=schema)
    with pytest.raises(DataError, match=message):
        load(weighted)


def test_events_of_a_retriever_have_weights(tmp_path):
    """The newest events are kept, with their weights."""
    pq.write_table(pa.table({"id": list(range(20))}), tmp_path / "item.parquet")
    rows = {
        "request_time": [1000, 1000],
        "uih_item_id": [[1, 2, 3], [4]],
        "uih_timestamps": [[1, 2, 3], [4]],
        "uih_actions": [[0, 1, 0], [1]],
        "uih_value": [[0.5, 2.0, 0.25], [3.0]],
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    pipeline = pipeline_of(RETRIEVER, 'model { retriever { weight_column: "uih_value" } }')
    pipeline.features[0].id.vocabulary.file = str(tmp_path / "item.parquet")
    data = f'train {{ parquet {{ paths: "{tmp_path}/rows.parquet" }} }} max_history_len: 2 num_workers: 0'
    text_format.Merge(data, pipeline.data)
    rule = LayoutRule(num_contextual=0, targets=False)
    (batch,) = Loader.open(pipeline, "train", rule, mode="train").epoch(0)
    actual = dict(
        zip(
            batch.rows.row.tolist(), batch.weights["uih_value"].split(batch.uih_lengths.tolist()), strict=True
        )
    )
    assert {row: values.tolist() for row, values in actual.items() if row >= 0} == {0: [2.0, 0.25], 1: [3.0]}
