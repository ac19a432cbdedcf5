"""Rows that break the contract: an error that names file, row and column, or left out and counted."""

import copy
import math

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import text_format

from recsys import protos as pb
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.packer import Packer
from recsys.data.schema.layout_rule import LayoutRule
from recsys.errors import DataError

ORIGIN = Origin(file=0, first_row=100, path="part-3.parquet")
BAD = 4
"""The row that is broken, of 8; errors call it 104."""


def change(column: str, value):
    """Puts a value (or what a function makes of the old one) into the bad row."""

    def apply(rows: list[dict]) -> None:
        rows[BAD][column] = value(rows[BAD][column]) if callable(value) else value

    return apply


def put(column: str, place: int, value):
    """Puts a value at one place of a list of the bad row."""

    def apply(rows: list[dict]) -> None:
        rows[BAD][column][place] = value

    return apply


def drop_last(values: list) -> list:
    return values[:-1]


def same_key(rows: list[dict]) -> None:
    for name in ("user_id", "request_time"):
        rows[BAD][name] = rows[BAD - 1][name]


CASES = {
    # Each broken row: (change, reason, message, types that differ from the usual ones).
    "null id": (change("user_id", None), "null", "user_id is null; write a missing id as an id that", {}),
    "null time": (change("request_time", None), "null", r"request_time is null\.", {}),
    "null number": (change("age", None), "null", "age is null; numeric.fill of the feature gives", {}),
    "null list": (
        change("uih_item_id", None),
        "null",
        r"uih_item_id is null. An empty list is written \[\]",
        {},
    ),
    "null label list": (change("candidate_is_click", None), "null", "candidate_is_click is null", {}),
    "null in a list": (
        put("uih_item_id", 1, None),
        "null",
        r"uih_item_id\[1\] is null; write a missing id",
        {},
    ),
    "null time in a list": (put("uih_timestamps", 2, None), "null", r"uih_timestamps\[2\] is null", {}),
    "null label": (put("candidate_seconds", 1, None), "null", r"candidate_seconds\[1\] is null", {}),
    "null inner list": (put("candidate_tags", 0, None), "null", "candidate_tags has a null list in it", {}),
    "null in an inner list": (
        put("candidate_tags", 1, [3, None]),
        "null",
        r"candidate_tags\[1\]\[1\] is null",
        {},
    ),
    "ragged times": (
        change("uih_timestamps", drop_last),
        "ragged",
        "uih_timestamps has 2 items, uih_item_id has 3",
        {},
    ),
    "ragged actions": (
        change("uih_actions", lambda x: [*x, 1]),
        "ragged",
        "uih_actions has 4 items, uih_item_id has 3",
        {},
    ),
    "ragged labels": (
        change("candidate_is_click", drop_last),
        "ragged",
        "candidate_is_click has 1 items, candidate_item_id has 2",
        {},
    ),
    "ragged multi-valued": (
        change("uih_tags", drop_last),
        "ragged",
        "uih_tags has 2 items, uih_item_id has 3",
        {},
    ),
    "NaN number": (change("age", math.nan), "not_finite", "age is nan", {}),
    "infinite number": (
        put("candidate_duration", 0, math.inf),
        "not_finite",
        r"candidate_duration\[0\] is inf",
        {},
    ),
    "label beyond float32": (
        put("candidate_seconds", 1, 1e300),
        "too_large",
        r"candidate_seconds\[1\] is 1e\+300, more",
        {"candidate_seconds": pa.list_(pa.float64())},
    ),
    "NaN watch time": (put("uih_watch_time", 2, math.nan), "not_finite", r"uih_watch_time\[2\] is nan", {}),
    "NaN label": (put("candidate_seconds", 0, math.nan), "not_finite", r"candidate_seconds\[0\] is nan", {}),
    "NaN binary label": (
        put("candidate_is_click", 0, math.nan),
        "not_finite",
        r"candidate_is_click\[0\] is nan",
        {"candidate_is_click": pa.list_(pa.float32())},
    ),
    "negative id": (
        put("uih_item_id", 0, -5),
        "negative",
        r"uih_item_id\[0\] is -5; ids are 0 or larger",
        {},
    ),
    "negative hashed id": (change("user_id", -1), "negative", "user_id is -1", {}),
    "negative inner id": (put("uih_tags", 2, [0, -3]), "negative", r"uih_tags\[2\]\[1\] is -3", {}),
    "negative time": (
        change("uih_timestamps", [-7, 1, 2]),
        "negative",
        r"uih_timestamps\[0\] is -7; times are",
        {},
    ),
    "negative actions": (
        put("uih_actions", 1, -1),
        "negative",
        r"uih_actions\[1\] is -1; action masks are",
        {},
    ),
    "negative watch time": (put("uih_watch_time", 1, -0.5), "negative", r"uih_watch_time\[1\] is -0.5", {}),
    "id of 64 bits": (
        put("uih_item_id", 2, 2**63 + 11),
        "too_large",
        rf"uih_item_id\[2\] is {2**63 + 11}, more than int64 holds",
        {"uih_item_id": pa.list_(pa.uint64())},
    ),
    "milliseconds": (
        change("request_time", 1_700_000_000_000),
        "too_large",
        "request_time is 1700000000000, which looks like milliseconds",
        {},
    ),
    "unsorted": (
        change("uih_timestamps", [900, 902, 901]),
        "unsorted",
        r"uih_timestamps\[2\] is 901, the one before it 902: not sorted.*preparation tools sort",
        {},
    ),
    "event after the request": (
        put("uih_timestamps", 2, 1041),
        "future_event",
        r"uih_timestamps\[2\] is 1041, later than request_time 1040",
        {},
    ),
    "candidate before an event": (
        lambda rows: [
            row.update(candidate_timestamps=[1100, 900 if row is rows[BAD] else 1100]) for row in rows
        ],
        "future_event",
        r"candidate_timestamps\[1\] is 900, before the newest event at 902",
        {"candidate_timestamps": pa.list_(pa.int64())},
    ),
    "binary label": (
        put("candidate_is_click", 1, 2),
        "label",
        r"candidate_is_click\[1\] is 2; a binary task",
        {},
    ),
    "label of a logarithm": (
        put("candidate_seconds", 1, -1.5),
        "label",
        r"candidate_seconds\[1\] is -1.5; log\(1 \+ label\)",
        {},
    ),
    "too many candidates": (
        lambda rows: rows.__setitem__(BAD, type(rows[0])(rows[BAD], **_candidates(6))),
        "too_many_candidates",
        r"6 candidates after 3 events; at most 5 fit \(model.max_seq_len is 10\)",
        {},
    ),
    "same key and time": (
        same_key,
        "duplicate_key",
        r"has the same user_id = 3 and request_time = 1030 as another row, 1 row before it",
        {},
    ),
}


def _candidates(count: int) -> dict:
    return {
        "candidate_item_id": [50] * count,
        "candidate_tags": [[]] * count,
        "candidate_duration": [1.0] * count,
        "candidate_is_click": [0] * count,
        "candidate_seconds": [1.0] * count,
    }


def good_rows(sample) -> list[dict]:
    return [sample.row(i) for i in range(8)]


def broken_table(sample, case: str) -> pa.Table:
    apply, _, _, types = CASES[case]
    rows = copy.deepcopy(good_rows(sample))
    apply(rows)
    schema = sample.schema
    for name, kind in types.items():
        place = schema.get_field_index(name)
        schema = (
            schema.set(place, pa.field(name, kind)) if place >= 0 else schema.append(pa.field(name, kind))
        )
    return sample.table(rows, schema)


@pytest.fixture
def converter(sample):
    sample.pipeline.model.max_seq_len = 10
    return lambda: Converter.open(sample.pipeline, LayoutRule(2, True), mode="train")


@pytest.mark.parametrize("case", CASES)
def test_policy_error_names_file_row_and_column(sample, converter, case):
    _, _, message, _ = CASES[case]
    with pytest.raises(
        DataError, match=rf"^part-3.parquet, row 104: {message}.*data.bad_rows {{ policy: SKIP }}"
    ):
        converter().block(broken_table(sample, case), ORIGIN)


@pytest.mark.parametrize("case", CASES)
def test_policy_skip_leaves_a_filler_row_and_counts_it(sample, converter, case):
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    table = broken_table(sample, case)
    pack = Packer(sample.pipeline, LayoutRule(), "train").pack
    arrays = pack(converter().block(table, ORIGIN))
    assert dict(arrays.counts) == {CASES[case][1]: 1}
    assert arrays.sample_weight.tolist() == [float(i != BAD) for i in range(8)]
    assert arrays.row.tolist() == list(range(100, 108))
    # The others are what they are without the bad row.
    others = pack(converter().block(table.filter(pa.array(np.arange(8) != BAD)), ORIGIN))
    assert others.uih_lengths.tolist() == np.delete(arrays.uih_lengths, BAD).tolist()
    assert arrays.uih_lengths[BAD] == arrays.num_candidates[BAD] == arrays.request_time[BAD] == 0
    for name in ("uih_timestamps", "uih_actions", "uih_watch_time", "candidate_timestamps"):
        assert getattr(others, name).tolist() == getattr(arrays, name).tolist()
    assert {k: v.tolist() for k, v in others.labels.items()} == {
        k: v.tolist() for k, v in arrays.labels.items()
    }
    keep = np.ones(len(arrays.id_values), bool)
    # USER columns keep row 0 for the contextual token: user_id is the first column, age the last.
    keep[[BAD, len(keep) - 8 + BAD]] = False
    assert arrays.id_values[~keep].tolist() == [0, 0]
    assert arrays.id_values[keep].tolist() == others.id_values.tolist()


def test_good_rows_pass(sample, converter):
    assert not converter().block(sample.table(good_rows(sample)), ORIGIN).codes.any()


def test_the_first_bad_row_is_named_and_the_others_are_counted(sample, converter):
    rows = good_rows(sample)
    rows[6]["user_id"] = None
    rows[2]["candidate_is_click"][0] = 7
    rows[5]["uih_item_id"][0] = -1
    with pytest.raises(
        DataError, match=r"row 102: candidate_is_click\[0\] is 7.*\(2 more bad rows in this row group"
    ):
        converter().block(sample.table(rows), ORIGIN)


def test_every_row_bad(sample, converter):
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    rows = good_rows(sample)
    for row in rows:
        row["age"] = None
    packer = Packer(sample.pipeline, LayoutRule(), "train")
    arrays = packer.pack(converter().block(sample.table(rows), ORIGIN))
    assert arrays.counts["null"] == 8 and not arrays.sample_weight.any()


def test_equal_times_and_an_event_at_the_request_are_fine(sample, converter):
    rows = good_rows(sample)
    rows[BAD]["uih_timestamps"] = [1040, 1040, 1040]
    assert not converter().block(sample.table(rows), ORIGIN).codes.any()


def test_a_filled_number_may_be_null_but_not_nan(sample, converter):
    rows = good_rows(sample)
    rows[BAD]["candidate_duration"][0] = None
    packer = Packer(sample.pipeline, LayoutRule(), "train")
    arrays = packer.pack(converter().block(sample.table(rows), ORIGIN))
    assert arrays.numbers["candidate_duration"][2 * BAD] == (2 - 2) / 4
    rows[BAD]["candidate_duration"][0] = math.nan
    with pytest.raises(DataError, match=r"candidate_duration\[0\] is nan"):
        converter().block(sample.table(rows), ORIGIN)


def test_the_same_key_at_another_time_is_another_request(sample, converter):
    rows = good_rows(sample)
    rows[BAD]["user_id"] = rows[0]["user_id"]
    assert not converter().block(sample.table(rows), ORIGIN).codes.any()


def test_a_bad_row_of_a_multi_valued_user_feature(sample, converter):
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    sample.pipeline.features.add(
        name="groups",
        sides=[pb.USER],
        id=pb.IdFeature(hash=pb.HashBuckets(num_buckets=5), multi_valued=True, table="groups"),
    )
    groups = [[1, 2], [], None, [3], [4, -4], [0], [], [1, 1, 1]]
    table = sample.table(good_rows(sample)).append_column("groups", pa.array(groups, pa.list_(pa.int64())))
    arrays = Packer(sample.pipeline, LayoutRule(), "train").pack(converter().block(table, ORIGIN))
    assert dict(arrays.counts) == {"null": 1, "negative": 1}
    assert arrays.value_counts["groups"].tolist() == [2, 0, 0, 1, 0, 1, 0, 3]
    assert arrays.id_lengths[-8:].tolist() == [2, 0, 0, 1, 0, 1, 0, 3]


@pytest.mark.parametrize(
    ("numeric", "largest"),
    [
        # float32 ends at 2^128 - 2^104.
        ("normalize {}", 2.0**128 - 2.0**104),
        ("normalize { std: 0.5 }", 2.0**127 - 2.0**103),
        ("normalize { std: 1e10 }", 1e10 * (2.0**128 - 2.0**104)),
        ("normalize { log1p: true }", 1.7e308),
        ("bucketize { boundaries: 0 }", 1.7e308),
    ],
)
def test_numbers_that_float32_cannot_hold_are_bad_rows(sample, converter, numeric, largest):
    """Not a loss that is infinite some steps later."""
    duration = next(item for item in sample.pipeline.features if item.name == "duration")
    duration.numeric.Clear()
    text_format.Parse(numeric, duration.numeric)
    rows = sample.rows(3)

    def values(number: float) -> np.ndarray:
        rows[1]["candidate_duration"][0] = number
        return converter().block(sample.table(rows), ORIGIN).flat["candidate_duration"].values

    for sign in (1, -1):
        assert np.isfinite(values(sign * largest)).all()
        if largest < 1e308:
            with pytest.raises(
                DataError, match=r"row 101: candidate_duration\[0\] is .*e\+\d+, more than the"
            ):
                values(sign * largest * (1 + 1e-6))
