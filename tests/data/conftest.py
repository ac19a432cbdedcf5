"""Small configs and files for the tests of the data path."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb

RANKER = """
data {
  train { parquet { paths: "%(folder)s/train.parquet" } }
  validation { parquet { paths: "%(folder)s/train.parquet" } }
  batch_size: 4
  num_workers: 0
  max_history_len: 5
  num_lanes: 2
  shuffle_row_groups: 2
  key_columns: "user_id"
  bad_rows { policy: ERROR }
}
features { name: "user_id" sides: USER id { hash { num_buckets: 97 } table: "user" } }
features { name: "item_id" sides: HISTORY sides: CANDIDATE
  id { vocabulary { file: "%(folder)s/vocabulary/item.parquet" size: 6 unknown_rate: 0 } table: "item" } }
features { name: "tags" sides: HISTORY sides: CANDIDATE
  id { hash { num_buckets: 11 } table: "tags" multi_valued: true } }
features { name: "duration" sides: CANDIDATE numeric { normalize { mean: 2 std: 4 } fill: 2 } }
features { name: "age" sides: USER numeric { bucketize { boundaries: 18 boundaries: 30 boundaries: 60 } } }
model {
  embedding_dim: 8
  embedding { placement: REPLICATED }
  ranker {
    preprocessor { contextual { action { bits { name: "click" bit: 0 } watch_time_thresholds: 3 } } }
    tasks { name: "is_click" loss { binary_cross_entropy {} } }
    tasks { name: "watch" label: "candidate_seconds" loss { mean_squared_error { log1p: true } } }
  }
}
"""

ITEM_IDS = [50, 7, 1000000007, 3, 12, 99]
"""The vocabulary: item ITEM_IDS[i] has row i + 1."""


def row(i: int, events: int = 3, candidates: int = 2) -> dict:
    """A good row; everything in it follows from `i` and the two counts."""
    return {
        "user_id": i,
        "age": 10.0 + i,
        "request_time": 1000 + 10 * i,
        "uih_item_id": [ITEM_IDS[(i + j) % 6] for j in range(events)],
        "uih_tags": [list(range(j % 3)) for j in range(events)],
        "uih_timestamps": [900 + j for j in range(events)],
        "uih_actions": [j % 4 for j in range(events)],
        "uih_watch_time": [0.5 * j for j in range(events)],
        "candidate_item_id": [ITEM_IDS[(i * j) % 6] for j in range(candidates)],
        "candidate_tags": [[i, j] for j in range(candidates)],
        "candidate_duration": [float(j) for j in range(candidates)],
        "candidate_is_click": [j % 2 for j in range(candidates)],
        "candidate_seconds": [1.5 * j for j in range(candidates)],
    }


SCHEMA = pa.schema(
    {
        "user_id": pa.int64(),
        "age": pa.float64(),
        "request_time": pa.int64(),
        "uih_item_id": pa.list_(pa.int64()),
        "uih_tags": pa.list_(pa.list_(pa.int64())),
        "uih_timestamps": pa.list_(pa.int64()),
        "uih_actions": pa.list_(pa.int64()),
        "uih_watch_time": pa.list_(pa.float32()),
        "candidate_item_id": pa.list_(pa.int64()),
        "candidate_tags": pa.list_(pa.list_(pa.int64())),
        "candidate_duration": pa.list_(pa.float64()),
        "candidate_is_click": pa.list_(pa.int64()),
        "candidate_seconds": pa.list_(pa.float32()),
    }
)


class Sample:
    """A folder with a vocabulary, a resolved ranking config, and rows to write."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "vocabulary").mkdir()
        ids = pa.table({"id": ITEM_IDS, "count": list(range(6, 0, -1))})
        pq.write_table(ids, folder / "vocabulary" / "item.parquet")
        parsed = text_format.Parse(RANKER % {"folder": folder}, pb.Pipeline())
        self.pipeline = config.resolve(parsed, read_files=False).pipeline

    row = staticmethod(row)
    schema = SCHEMA
    vocabulary = ITEM_IDS

    def set_keys(self, *names: str) -> None:
        """Other key columns, of which the first one groups rows."""
        self.pipeline.data.key_columns[:] = names
        self.pipeline.data.group_column = names[0] if names else ""

    def rows(self, count: int) -> list[dict]:
        """Good rows with lengths that differ, among them empty histories and rows without candidates."""
        return [row(i, events=(i * 7) % 5, candidates=i % 3) for i in range(count)]

    def table(self, rows: list[dict], schema: pa.Schema = SCHEMA) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=schema)

    def write(self, rows: list[dict], name: str = "train.parquet", row_group_size: int = 5, schema=SCHEMA):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        table = self.table(rows, schema)
        pq.write_table(
            table, path, row_group_size=row_group_size, write_page_checksum=True, compression="zstd"
        )
        return path


@pytest.fixture
def sample(tmp_path) -> Sample:
    return Sample(tmp_path)
