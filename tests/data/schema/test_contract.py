"""Files that do not fit the config: all findings at once, each with its remedy."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import protos as pb
from recsys.data.schema.contract import check_same_schema, check_schema, needed_columns
from recsys.errors import DataError


def replaced(schema: pa.Schema, name: str, kind: pa.DataType) -> pa.Schema:
    return schema.set(schema.get_field_index(name), pa.field(name, kind))


def problems(schema, pipeline, mode="train") -> str:
    with pytest.raises(DataError) as caught:
        check_schema(schema, pipeline, mode, "a.parquet")
    return str(caught.value)


def test_a_good_schema(sample):
    for mode in ("train", "evaluate", "predict"):
        check_schema(sample.schema, sample.pipeline, mode, "a.parquet")


def test_a_missing_column_with_the_likely_one(sample):
    schema = sample.schema
    place = schema.get_field_index("uih_item_id")
    schema = schema.set(place, pa.field("uih_itemid", schema.field(place).type))
    message = problems(schema, sample.pipeline)
    assert message.startswith("a.parquet: no column uih_item_id. Did you mean uih_itemid?")
    assert message.splitlines()[-1].startswith("a.parquet has the columns user_id, age, request_time,")


def test_all_findings_at_once(sample):
    schema = replaced(replaced(sample.schema, "age", pa.string()), "request_time", pa.float64())
    schema = schema.remove(schema.get_field_index("uih_tags"))
    lines = problems(schema, sample.pipeline).splitlines()
    assert len(lines) == 4
    assert {re.search(r"column (\w+)", line)[1] for line in lines[:-1]} == {"age", "request_time", "uih_tags"}


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("request_time", pa.timestamp("s"), "column request_time is timestamp[s]; it must be int64 seconds"),
        ("uih_timestamps", pa.list_(pa.float64()), "it must be list of int64 seconds"),
        ("uih_timestamps", pa.int64(), "column uih_timestamps is int64; it must be list of int64 seconds"),
        ("uih_tags", pa.list_(pa.int64()), "it must be list of list of int64 or string"),
        ("candidate_item_id", pa.list_(pa.string()), "it must be list of int64, as the ids in"),
        ("candidate_is_click", pa.list_(pa.string()), "it must be list of number"),
        ("user_id", pa.float64(), "column user_id is double; it must be int64 or string"),
        ("age", pa.list_(pa.float64()), "it must be number"),
    ],
)
def test_a_wrong_type(sample, column, kind, message):
    assert message in problems(replaced(sample.schema, column, kind), sample.pipeline)


def test_text_vocabulary_wants_text(sample):
    pq.write_table(pa.table({"id": ["a", "b"]}), sample.folder / "vocabulary" / "item.parquet")
    assert "it must be list of string, as the ids in" in problems(sample.schema, sample.pipeline)


def test_a_column_twice(sample):
    schema = sample.schema.append(pa.field("age", pa.float64()))
    first = problems(schema, sample.pipeline).splitlines()[0]
    assert first == "a.parquet: column age occurs 2 times. Keep one."


def test_columns_that_are_not_read_may_be_anything(sample):
    schema = sample.schema.append(pa.field("notes", pa.string())).append(pa.field("notes", pa.int8()))
    check_schema(schema, sample.pipeline, "train", "a.parquet")
    assert "notes" not in needed_columns(sample.pipeline, "train", schema)


def test_what_a_use_reads(sample):
    needed = {
        mode: set(needed_columns(sample.pipeline, mode, sample.schema)) for mode in ("train", "predict")
    }
    assert needed["train"] == set(sample.schema.names)
    assert needed["train"] - needed["predict"] == {"candidate_is_click", "candidate_seconds"}
    no_labels = pa.schema(
        [f for f in sample.schema if f.name not in ("candidate_is_click", "candidate_seconds")]
    )
    check_schema(no_labels, sample.pipeline, "predict", "a.parquet")
    assert "no column candidate_is_click" in problems(no_labels, sample.pipeline, "evaluate")


def test_a_retriever_reads_candidates_for_evaluation_only(sample):
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(sample.pipeline)
    pipeline.model.retriever.item_feature = "item_id"
    history_only = pa.schema([field for field in sample.schema if not field.name.startswith("candidate_")])
    for mode in ("train", "predict"):
        check_schema(history_only, pipeline, mode, "a.parquet")
    assert "no column candidate_item_id" in problems(history_only, pipeline, "evaluate")


def test_actions_are_wanted_when_an_encoder_reads_them(sample):
    less = pa.schema([f for f in sample.schema if f.name not in ("uih_actions", "uih_watch_time")])
    message = problems(less, sample.pipeline)
    assert "no column uih_actions" in message and "no column uih_watch_time" in message
    sample.pipeline.model.ranker.preprocessor.contextual.ClearField("action")
    check_schema(less, sample.pipeline, "train", "a.parquet")


def test_missing_key_column(sample):
    sample.pipeline.data.key_columns.append("session")
    assert "no column session" in problems(sample.schema, sample.pipeline, "predict")


@pytest.mark.parametrize("setting", ["key_columns", "group_column"])
@pytest.mark.parametrize("mode", ["train", "predict"])
def test_a_key_column_has_one_value_a_row(sample, setting, mode):
    if setting == "key_columns":
        sample.pipeline.data.key_columns[:] = ["uih_item_id", "user_id"]
    else:
        sample.pipeline.data.group_column = "uih_item_id"
    first = problems(sample.schema, sample.pipeline, mode).splitlines()[0]
    assert first.startswith("a.parquet: column uih_item_id is list<")
    assert first.endswith(
        "a key column has one number or text per row. Name another one in data.key_columns and "
        "data.group_column."
    )


@pytest.mark.parametrize("kind", [pa.string(), pa.int8(), pa.dictionary(pa.int32(), pa.string())])
def test_a_key_may_be_a_number_or_a_text(sample, kind):
    sample.pipeline.data.key_columns[:] = ["session"]
    check_schema(sample.schema.append(pa.field("session", kind)), sample.pipeline, "train", "a.parquet")


def test_files_of_a_source_have_the_same_types(sample):
    narrowed = replaced(sample.schema, "uih_actions", pa.list_(pa.int32()))
    columns = needed_columns(sample.pipeline, "train", sample.schema)
    check_same_schema(sample.schema, "b.parquet", sample.schema, "a.parquet", columns)
    with pytest.raises(
        DataError, match=r"b.parquet: column uih_actions is list<.*int32>, in a.parquet it is list"
    ):
        check_same_schema(narrowed, "b.parquet", sample.schema, "a.parquet", columns)
    optional = sample.schema.append(pa.field("candidate_timestamps", pa.list_(pa.int64())))
    with pytest.raises(
        DataError, match="b.parquet: column candidate_timestamps is missing, a.parquet has it"
    ):
        check_same_schema(sample.schema, "b.parquet", optional, "a.parquet", ["candidate_timestamps"])
