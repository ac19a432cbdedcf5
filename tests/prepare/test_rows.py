"""Requests and histories against loops, and what the writer puts on disk."""

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.prepare import rows as prepare_rows
from recsys.prepare.rows import Contents, DatasetWriter, Feature, IdCounts, Moments, Slices

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 1)), max_size=40).map(
    lambda events: sorted(events, key=lambda event: event[:2])
)


@given(EVENTS, st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_request_slices_against_a_loop(events, gap, max_candidates, max_history):
    expected, request = [], []
    for index, (user, time, tab) in enumerate(events):
        last = events[index - 1] if index else None
        fits = request and last[0] == user and last[2] == tab and time - last[1] <= gap
        if not fits or len(request) == max_candidates:
            request = []
            expected.append(request)
        request.append(index)
    user, time, tab = np.array(events, dtype=np.int64).reshape(-1, 3).T
    found = prepare_rows.request_slices(
        user, time, gap=gap, max_candidates=max_candidates, max_history=max_history, apart=(tab,)
    )
    assert [
        list(range(a, b)) for a, b in zip(found.candidate_start, found.candidate_end, strict=True)
    ] == expected
    for row, request in enumerate(expected):
        first = events[request[0]]
        before = [i for i, event in enumerate(events) if event[0] == first[0] and event[1] < first[1]]
        history = range(found.history_start[row], found.history_end[row])
        assert list(history) == before[-max_history:]


@given(st.lists(st.integers(1, 6), max_size=6), st.sampled_from([1, 2]), st.none() | st.integers(1, 3))
def test_holdout_slices_against_a_loop(lengths, held_out, max_history):
    user = np.repeat(np.arange(len(lengths)), lengths)
    for with_candidate in (False, True):
        expected, start = [], 0
        for length in lengths:
            indices = list(range(start, start + length))
            start += length
            if length >= 3:
                target = [indices[-held_out]] if with_candidate else []
                expected.append((indices[:-held_out][-(max_history or 99) :], target))
            elif not with_candidate:
                expected.append((indices[-(max_history or 99) :], []))
        found = prepare_rows.holdout_slices(
            user, held_out=held_out, with_candidate=with_candidate, max_history=max_history
        )
        rows = [(list(range(a, b)), list(range(c, d))) for a, b, c, d in zip(*found, strict=True)]
        assert rows == expected


def test_ids_go_by_count_then_first_occurrence_whatever_the_order_of_adding():
    counts = IdCounts()
    counts.add(pl.Series(["b", "c", ""]), pl.Series([5, 6, 7]))
    counts.add(pl.Series([["a", "b"], []], dtype=pl.List(pl.String)), pl.Series([1, 2]))
    counts.add(pl.Series(["d", "c"]), pl.Series([0, 9]))
    assert counts.table(min_count=1).to_pydict() == {"id": ["b", "c", "d", "a"], "count": [2, 2, 1, 1]}
    assert counts.table(min_count=2)["id"].to_pylist() == ["b", "c"]
    with_more = counts.table(min_count=2, catalogue=pl.Series(["z", "a", "y", "z"]))
    assert with_more.to_pydict() == {"id": ["b", "c", "d", "a", "z", "y"], "count": [2, 2, 1, 1, 0, 0]}


def test_moments_are_those_of_numpy():
    values = np.random.default_rng(0).normal(3, 40, 500)
    moments = Moments()
    moments.add(values[:100])
    moments.add(values[100:])
    found = moments.summary()
    logs = np.sign(values) * np.log1p(np.abs(values))
    assert found == pytest.approx(
        {"mean": values.mean(), "std": values.std(), "log1p_mean": logs.mean(), "log1p_std": logs.std()}
    )
    constant = Moments()
    constant.add(np.full(3, 2.0))
    assert constant.summary()["std"] == 1.0


def write(folder, rows_per_group=2):
    contents = Contents(
        "ranking", (Feature("item_id", ("HISTORY", "CANDIDATE")),), labels={"click": "binary"}
    )
    events = pa.table(
        {
            "item_id": pa.array([10, 11, 12, 13, 14]),
            "timestamps": pa.array([1, 2, 3, 4, 5]),
            "order": pa.array([0, 1, 2, 3, 4]),
            "label_click": pa.array([1, 0, 0, 1, 1], pa.float32()),
        }
    )
    slices = Slices(*(np.array(part) for part in ([0, 0, 1], [0, 2, 3], [0, 2, 3], [2, 3, 5])))
    rows = pa.table({"user_id": pa.array([7, 7, 7]), "request_time": pa.array([1, 3, 4])})
    writer = DatasetWriter(folder, contents, rows_per_group=rows_per_group)
    writer.write("train", "train.parquet", events, slices, rows)
    return writer


def test_lists_are_cut_from_the_events_group_by_group(tmp_path):
    writer = write(tmp_path)
    file = pq.ParquetFile(tmp_path / "train.parquet")
    assert file.metadata.num_row_groups == 2
    assert file.read().to_pydict() == {
        "user_id": [7, 7, 7],
        "request_time": [1, 3, 4],
        "uih_item_id": [[], [10, 11], [11, 12]],
        "uih_timestamps": [[], [1, 2], [2, 3]],
        "candidate_item_id": [[10, 11], [12], [13, 14]],
        "candidate_timestamps": [[1, 2], [3], [4, 5]],
        "candidate_click": [[1, 0], [0], [1, 1]],
    }
    assert writer.splits["train"] == {
        "files": ["train.parquet"],
        "rows": 3,
        "history_events": 4,
        "candidates": 5,
        "empty_histories": 1,
        "first_request_time": 1,
        "last_request_time": 4,
        "label_sums": {"click": 3.0},
    }


def test_a_flipped_byte_is_found_by_the_page_checksum(tmp_path):
    write(tmp_path)
    path = tmp_path / "train.parquet"
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + column.total_compressed_size - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(path, page_checksum_verification=True)
