"""From rows to a batch, against a loop over the rows."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import protos as pb
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.packer import Packer
from recsys.data.schema.layout_rule import LayoutRule
from recsys.data.schema.vocabulary import HashBuckets


def convert(pipeline, table, mode="train", origin=Origin(), rows=None):  # noqa: B008 - a constant
    block = Converter.open(pipeline, LayoutRule(2, True), mode=mode).block(table, origin)
    if rows is not None:
        block = block.select(np.asarray(rows))
    return Packer(pipeline, LayoutRule(), mode).pack(block)


def bucket(value: int, buckets: int) -> int:
    return int(HashBuckets(buckets).map(pa.array([value]))[0])


def expected(rows: list[dict], vocabulary: list[int], max_history_len: int) -> dict:
    """Computes the expected arrays row by row."""
    item = {value: i + 1 for i, value in enumerate(vocabulary)}
    columns = {
        "user_id": [],
        "uih_item_id": [],
        "candidate_item_id": [],
        "uih_tags": [],
        "candidate_tags": [],
        "age": [],
    }
    lengths = {name: [] for name in columns}
    counts = {"uih_tags": [], "candidate_tags": []}
    flat = {
        name: []
        for name in ("uih_timestamps", "uih_actions", "uih_watch_time", "is_click", "watch", "duration")
    }
    for row in rows:
        events = slice(max(0, len(row["uih_item_id"]) - max_history_len), None)
        ids = {
            "user_id": [bucket(row["user_id"], 97)],
            "uih_item_id": [item.get(i, 0) for i in row["uih_item_id"][events]],
            "candidate_item_id": [item.get(i, 0) for i in row["candidate_item_id"]],
            "uih_tags": [bucket(tag, 11) for tags in row["uih_tags"][events] for tag in tags],
            "candidate_tags": [bucket(tag, 11) for tags in row["candidate_tags"] for tag in tags],
            "age": [sum(row["age"] >= limit for limit in (18, 30, 60))],
        }
        for name, values in ids.items():
            columns[name] += values
            lengths[name].append(len(values))
        counts["uih_tags"] += [len(tags) for tags in row["uih_tags"][events]]
        counts["candidate_tags"] += [len(tags) for tags in row["candidate_tags"]]
        for name in ("uih_timestamps", "uih_actions", "uih_watch_time"):
            flat[name] += row[name][events]
        flat["is_click"] += row["candidate_is_click"]
        flat["watch"] += row["candidate_seconds"]
        flat["duration"] += [(2.0 if x is None else x) / 4 - 0.5 for x in row["candidate_duration"]]
    return {"columns": columns, "lengths": lengths, "counts": counts, "flat": flat}


# The order of features in the config, sides in the order USER, HISTORY, CANDIDATE.
ID_COLUMNS = ["user_id", "uih_item_id", "candidate_item_id", "uih_tags", "candidate_tags", "age"]


def assert_arrays(arrays, rows, vocabulary, max_history_len=5):
    want = expected(rows, vocabulary, max_history_len)
    assert arrays.id_values.tolist() == [value for name in ID_COLUMNS for value in want["columns"][name]]
    assert arrays.id_lengths.tolist() == [n for name in ID_COLUMNS for n in want["lengths"][name]]
    assert {name: counts.tolist() for name, counts in arrays.value_counts.items()} == want["counts"]
    flat = want["flat"]
    assert arrays.uih_lengths.tolist() == want["lengths"]["uih_item_id"]
    assert arrays.num_candidates.tolist() == want["lengths"]["candidate_item_id"]
    assert arrays.uih_timestamps.tolist() == flat["uih_timestamps"]
    assert arrays.uih_actions.tolist() == flat["uih_actions"]
    assert arrays.uih_watch_time.tolist() == flat["uih_watch_time"]
    assert {name: labels.tolist() for name, labels in arrays.labels.items()} == {
        "is_click": flat["is_click"],
        "watch": flat["watch"],
    }
    assert arrays.numbers["candidate_duration"].tolist() == flat["duration"]
    assert arrays.request_time.tolist() == [row["request_time"] for row in rows]
    times = [row["request_time"] for row in rows for _ in row["candidate_item_id"]]
    assert arrays.candidate_timestamps.tolist() == times
    assert arrays.group.tolist() == [row["user_id"] for row in rows]
    assert arrays.sample_weight.tolist() == [1.0] * len(rows)


@pytest.fixture
def rows(sample):
    rows = sample.rows(12)
    rows[3]["uih_item_id"] = [4711] * len(rows[3]["uih_item_id"])  # never seen
    rows[5]["candidate_duration"] = [None, 8.0][: len(rows[5]["candidate_duration"])]
    rows.append(sample.row(20, events=9, candidates=3))  # too long
    rows.append(sample.row(21, events=5, candidates=0))
    return rows


def test_all_rows(sample, rows):
    assert_arrays(convert(sample.pipeline, sample.table(rows)), rows, sample.vocabulary)


def test_some_rows_in_another_order(sample, rows):
    order = [12, 0, 5, 13, 3, 3, 1]
    arrays = convert(sample.pipeline, sample.table(rows), rows=order)
    assert_arrays(arrays, [rows[i] for i in order], sample.vocabulary)
    assert arrays.row.tolist() == order


def test_of_a_long_history_the_newest_events_are_kept_and_it_is_counted(sample, rows):
    sample.pipeline.data.max_history_len = 2
    arrays = convert(sample.pipeline, sample.table(rows))
    assert_arrays(arrays, rows, sample.vocabulary, max_history_len=2)
    assert dict(arrays.counts) == {"truncated_history": sum(len(row["uih_item_id"]) > 2 for row in rows)}


def test_arrays_arrive_as_they_were_sent(sample, rows):
    arrays = convert(sample.pipeline, sample.table(rows), mode="evaluate")
    block = Converter.open(sample.pipeline, LayoutRule(2, True), mode="evaluate").block(
        sample.table(rows), Origin()
    )
    packed = Packer(sample.pipeline, LayoutRule(), "evaluate").packed(block)
    arrived = pickle.loads(pickle.dumps(packed)).arrays()  # noqa: S301 - made here
    assert_arrays(arrived, rows, sample.vocabulary)
    for name, value in vars(arrays).items():
        if isinstance(value, np.ndarray):
            joined = getattr(arrived, name)
            assert joined.dtype == value.dtype and joined.flags.writeable and joined.flags.aligned
    assert arrived.keys.equals(arrays.keys) and arrived.counts == arrays.counts


def test_tables_that_are_slices_and_chunks(sample, rows):
    table = sample.table(rows)
    chunked = pa.concat_tables([table.slice(0, 5), table.slice(5)])
    assert_arrays(convert(sample.pipeline, chunked.slice(2, 8)), rows[2:10], sample.vocabulary)


@pytest.mark.parametrize("change", ["narrow", "large_list", "dictionary", "unsigned"])
def test_other_types_with_the_same_meaning(sample, rows, change):
    table = sample.table(rows)
    kinds = {
        "narrow": {
            "uih_actions": pa.list_(pa.int8()),
            "candidate_is_click": pa.list_(pa.bool_()),
            "age": pa.float32(),
        },
        "large_list": {name: pa.large_list(pa.int64()) for name in ("uih_item_id", "uih_timestamps")},
        "dictionary": {"user_id": pa.dictionary(pa.int32(), pa.int64())},
        "unsigned": {"uih_item_id": pa.list_(pa.uint64()), "user_id": pa.uint32()},
    }
    for name, kind in kinds[change].items():
        column = table[name].combine_chunks()
        column = column.dictionary_encode() if change == "dictionary" else column.cast(kind)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    assert_arrays(convert(sample.pipeline, table), rows, sample.vocabulary)


def test_candidates_are_cut_and_counted_but_never_for_prediction(sample, rows):
    sample.pipeline.data.max_candidates = 2
    arrays = convert(sample.pipeline, sample.table(rows))
    assert arrays.num_candidates.tolist() == [min(2, len(row["candidate_item_id"])) for row in rows]
    assert arrays.counts["truncated_candidates"] == sum(len(row["candidate_item_id"]) > 2 for row in rows)
    assert arrays.labels["is_click"].tolist() == [x for row in rows for x in row["candidate_is_click"][:2]]
    with pytest.raises(
        Exception, match=r"row 12: 3 candidates .* at most 2 fit \(data.max_candidates is 2\)"
    ):
        convert(sample.pipeline, sample.table(rows), mode="predict")


def test_own_times_of_candidates(sample):
    rows = [sample.row(1, candidates=2), sample.row(2, candidates=1)]
    table = sample.table(rows).append_column("candidate_timestamps", pa.array([[1010, 1200], [1500]]))
    assert convert(sample.pipeline, table).candidate_timestamps.tolist() == [1010, 1200, 1500]


def test_prediction_needs_no_labels_and_carries_keys(sample, rows):
    table = sample.table(rows).drop_columns(["candidate_is_click", "candidate_seconds"])
    arrays = convert(sample.pipeline, table, mode="predict", rows=[4, 2])
    assert arrays.labels == {}
    assert arrays.keys.to_pydict() == {"user_id": [4, 2]}
    assert convert(sample.pipeline, sample.table(rows)).keys is None


def test_actions_that_no_encoder_reads_are_not_wanted(sample, rows):
    sample.pipeline.model.ranker.preprocessor.contextual.ClearField("action")
    table = sample.table(rows).drop_columns(["uih_actions", "uih_watch_time"])
    arrays = convert(sample.pipeline, table)
    events = sum(min(5, len(row["uih_item_id"])) for row in rows)
    assert arrays.uih_actions.tolist() == [0] * events and arrays.uih_actions.dtype == np.int64
    assert arrays.uih_watch_time.tolist() == [0.0] * events and arrays.uih_watch_time.dtype == np.float32


def text_vocabulary(sample):
    """The item vocabulary with texts for ids, and rows to match."""
    ids = [f"sku-{i}" for i in sample.vocabulary]
    pq.write_table(pa.table({"id": ids}), sample.folder / "vocabulary" / "item.parquet")
    return ids


def test_text_ids_and_text_groups(sample, rows):
    vocabulary = text_vocabulary(sample)
    for row in rows:
        for name in ("uih_item_id", "candidate_item_id"):
            row[name] = [f"sku-{i}" for i in row[name]]
        row["user_id"] = f"user {row['user_id'] % 3}"
    schema = sample.schema
    for name in ("uih_item_id", "candidate_item_id"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.list_(pa.string())))
    schema = schema.set(schema.get_field_index("user_id"), pa.field("user_id", pa.string()))
    arrays = convert(sample.pipeline, sample.table(rows, schema))
    item = {value: i + 1 for i, value in enumerate(vocabulary)}
    first, second = len(rows), sum(min(5, len(row["uih_item_id"])) for row in rows)
    want = [item.get(i, 0) for row in rows for i in row["uih_item_id"][-5:]]
    assert arrays.id_values[first : first + second].tolist() == want
    groups = {}
    for row, group in zip(rows, arrays.group.tolist(), strict=True):
        assert groups.setdefault(row["user_id"], group) == group
    assert len(set(groups.values())) == 3


def hidden(sample, epoch: int, first_row: int = 0, mode="train", **selected) -> np.ndarray:
    rows = [sample.row(i, events=5, candidates=3) for i in range(400)]
    arrays = convert(sample.pipeline, sample.table(rows), mode, Origin(0, first_row, "t", epoch), **selected)
    count = len(arrays.row)
    return arrays.id_values[count : count + 8 * count] == 0


def test_a_share_of_the_ids_is_shown_as_unknown_in_training_only(sample):
    vocabulary = sample.pipeline.features[1].id.vocabulary
    vocabulary.unknown_rate = 0.3
    share = hidden(sample, epoch=0).mean()
    # 3200 draws: standard deviation sqrt(.3 * .7 / 3200) = 0.008.
    assert abs(share - 0.3) < 0.03
    assert not hidden(sample, epoch=0, mode="evaluate").any()
    assert (hidden(sample, 0) == hidden(sample, 0)).all()
    assert (hidden(sample, 0) != hidden(sample, 1)).any()
    assert (hidden(sample, 0) != hidden(sample, 0, first_row=400)).any()
    vocabulary.unknown_rate = 1
    assert hidden(sample, 0).all()
    vocabulary.unknown_rate = 0
    assert not hidden(sample, 0).any()


def test_what_is_shown_as_unknown_does_not_depend_on_the_batch(sample):
    sample.pipeline.features[1].id.vocabulary.unknown_rate = 0.3
    counts = [7, 300, 20]
    alone, whole = hidden(sample, 0, rows=counts), hidden(sample, 0)
    assert alone[:15].tolist() == whole[: 400 * 5].reshape(400, 5)[counts].ravel().tolist()
    assert alone[15:].tolist() == whole[400 * 5 :].reshape(400, 3)[counts].ravel().tolist()


def test_filler_rows_have_the_shape_of_a_batch_and_no_weight(sample, rows):
    filler = Packer(sample.pipeline, LayoutRule(), "train").filler(3)
    real = convert(sample.pipeline, sample.table(rows[:3]))
    assert filler.sample_weight.tolist() == [0, 0, 0] and filler.row.tolist() == [-1, -1, -1]
    assert filler.uih_lengths.tolist() == filler.num_candidates.tolist() == [0, 0, 0]
    # USER features keep one value a row, as contextual tokens want it.
    assert filler.id_lengths.reshape(6, 3).sum(1).tolist() == [3, 0, 0, 0, 0, 3]
    for name in (
        "id_values",
        "request_time",
        "uih_timestamps",
        "uih_watch_time",
        "candidate_timestamps",
        "group",
    ):
        assert getattr(filler, name).dtype == getattr(real, name).dtype
    assert filler.labels.keys() == real.labels.keys() and filler.numbers.keys() == real.numbers.keys()


def test_a_group_of_its_own(sample, rows):
    sample.pipeline.data.group_column = "age"
    assert len(set(convert(sample.pipeline, sample.table(rows)).group.tolist())) == len(rows)
    sample.pipeline.data.ClearField("group_column")
    del sample.pipeline.data.key_columns[:]
    assert set(convert(sample.pipeline, sample.table(rows)).group.tolist()) == {0}


def test_a_retriever_reads_candidates_for_evaluation_only(sample, rows):
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(sample.pipeline)
    pipeline.model.ClearField("ranker")
    pipeline.model.retriever.item_feature = "item_id"
    history_only = sample.table(rows).select(
        ["user_id", "age", "request_time", "uih_item_id", "uih_tags", "uih_timestamps"]
    )
    arrays = convert(pipeline, history_only)
    assert arrays.num_candidates.tolist() == [0] * len(rows)
    lengths = arrays.id_lengths.reshape(len(ID_COLUMNS), len(rows)).sum(1)
    assert lengths[2] == lengths[4] == 0 and lengths[1] > 0
    assert (
        arrays.value_counts["candidate_tags"].tolist() == [] == arrays.numbers["candidate_duration"].tolist()
    )
    evaluated = convert(pipeline, sample.table(rows), mode="evaluate")
    assert evaluated.num_candidates.tolist() == [len(row["candidate_item_id"]) for row in rows]
