"""The writer of data sets: its counts and the files it makes."""

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.prepare.dataset_writer import Contents, DatasetWriter, Feature, IdCounts, Moments
from recsys.prepare.rows import Slices


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
    actual = moments.summary()
    logs = np.sign(values) * np.log1p(np.abs(values))
    assert actual == pytest.approx(
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
