#!/usr/bin/env python3
"""Speed on the CPU as ratios measured in one run, so that another machine can check them.

    .venv/bin/python scripts/bench_cpu.py [reader ...]

Each section times one thing against a yardstick on the same machine, prints one line, and fails below its bar (exit 1).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf import text_format

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.sources import open_source

REPEATS = 3


class Result(NamedTuple):
    """One line: `ratio` is ours over the yardstick, good when it is at least `bar`."""

    name: str
    detail: str
    ratio: float
    bar: float


# The reader: rows/s with 2 reader processes, all columns checked and converted, against pyarrow that only decodes.

READER_ROWS = 40_960
READER_CONFIG = """
data {
  train { synthetic { num_rows: %(rows)d max_history_len: 200 max_candidates: 16 } }
  batch_size: 64
  num_workers: 2
  key_columns: "row_id"
}
features { name: "user_id" sides: USER id { hash { num_buckets: 100000 } table: "user_id" } }
features { name: "country" sides: USER id { hash { num_buckets: 300 } table: "country" } }
features { name: "item_id" sides: HISTORY sides: CANDIDATE
  id { vocabulary { file: "%(vocabulary)s" } table: "item_id" } }
features { name: "author_id" sides: HISTORY sides: CANDIDATE id { hash { num_buckets: 50000 } table: "author_id" } }
features { name: "duration" sides: HISTORY sides: CANDIDATE numeric { normalize { log1p: true std: 2 } } }
model {
  embedding_dim: 64
  ranker {
    preprocessor { contextual { action { bits { name: "click" } watch_time_thresholds: 10 } } }
    tasks { name: "is_click" loss { binary_cross_entropy {} } }
    tasks { name: "long_view" loss { binary_cross_entropy {} } }
  }
}
"""


def bench_reader(folder: Path) -> Result:
    """Rows/s of `Loader.epoch`, process start aside, over rows/s of `ParquetFile.iter_batches` of the same file."""
    pipeline = _reader_file(folder)
    loader = Loader(pipeline, "train", LayoutRule(num_contextual=2), shuffle=True)
    path = pipeline.data.train.parquet.paths[0]
    plain, ours = [], []
    for _ in range(REPEATS):
        plain.append(
            _rate(pq.ParquetFile(path).iter_batches(pipeline.data.batch_size), lambda batch: batch.num_rows)
        )
        ours.append(_rate(loader.epoch(0), lambda batch: len(batch.request_time)))
    detail = f"{statistics.median(ours):,.0f} rows/s, plain pyarrow {statistics.median(plain):,.0f} rows/s"
    return Result("reader", detail, statistics.median(ours) / statistics.median(plain), bar=0.5)


def _reader_file(folder: Path) -> pb.Pipeline:
    """A config whose rows lie in one parquet file, made by the synthetic source."""
    vocabulary = folder / "item_id.parquet"
    ids = np.random.default_rng(0).choice(10**12, 200_000, replace=False)
    pq.write_table(pa.table({"id": ids}), vocabulary)
    text = READER_CONFIG % {"rows": READER_ROWS, "vocabulary": vocabulary}
    pipeline = text_format.Parse(text, pb.Pipeline())
    source = open_source(pipeline.data.train, pipeline)
    columns = source.check(pipeline, "train")
    tables = [source.read(group.file, group.number, columns) for group in source.row_groups]
    path = folder / "train.parquet"
    pq.write_table(
        pa.concat_tables(tables), path, row_group_size=1024, compression="zstd", write_page_checksum=True
    )
    pipeline.data.train.CopyFrom(pb.Source(parquet=pb.ParquetSource(paths=[str(path)])))
    return pipeline


def _rate(batches: Iterator, rows_of: Callable) -> float:
    """Rows a second, from the first batch to the last."""
    next(batches)
    start = time.perf_counter()
    rows = sum(rows_of(batch) for batch in batches)
    return rows / (time.perf_counter() - start)


SECTIONS: dict[str, Callable[[Path], Result]] = {"reader": bench_reader}


def main() -> int:
    """Runs the sections named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    names = parser.parse_args().sections or list(SECTIONS)
    passed = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            result = SECTIONS[name](Path(folder))
        good = result.ratio >= result.bar
        passed &= good
        verdict = "ok" if good else "BELOW THE BAR"
        print(
            f"{result.name}: {result.ratio:.2f}x (bar {result.bar}x) {verdict}: {result.detail}", flush=True
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
