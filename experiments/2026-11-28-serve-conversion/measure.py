"""Measures the CPU time of one thread for conversion, scoring and `Predictor.table`, and for reading batches.

python experiments/2026-11-28-serve-conversion/measure.py --package runs/quickstart/export
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import config
from recsys.data.loader import Loader
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.models.base import layout_rule
from recsys.serving.batcher import BatchLimits
from recsys.serving.model import ServingModel
from recsys.serving.schema import RequestLimits

CALLS, EPOCHS = 400, 7
ROWS = "tests/data/kuairand/test.parquet"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    package = Package(parser.parse_args().package)
    limits = RequestLimits(rows=64, history=1000, candidates=1000)
    serving = ServingModel(package, limits, BatchLimits(64, 0.0, 1000))
    predictor, server = Predictor(package), serving._predictor
    tables = [pq.read_table(ROWS).slice(100, count).combine_chunks() for count in (1, 16)]
    names = [name for name in serving.schema._names if name in tables[0].column_names]
    requests = [
        [serving.prepare(_json(table.slice(i, 1), names)) for i in range(len(table))] for table in tables
    ]
    asked = [serving.schema.table([row for request in batch for row in request.rows]) for batch in requests]
    blocks = [server.convert(table) for table in asked]
    steps: dict[str, Callable[[int], object]] = {
        "pyarrow table of requests": lambda i: serving.schema.table([r for q in requests[i] for r in q.rows]),
        "row checks and conversion": lambda i: server.convert(asked[i]),
        "packing, collation": lambda i: server._batch(blocks[i]),
        "all of scoring a converted block": lambda i: server.scores.of(blocks[i]),
        "a batch of a server, without JSON": lambda i: serving._run(requests[i]),
        "`Predictor.table`, conversion included": lambda i: predictor.table(tables[i]),
    }
    print("| CPU ms of one thread, median (10th percentile) | 1 row | 16 rows |\n| --- | ---: | ---: |")
    for name, step in steps.items():
        cells = [cpu_ms(lambda i=i, step=step: step(i)) for i in range(2)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nReader: {reader_ms():.3f} CPU ms a training batch of 64 rows, median of {EPOCHS - 1} epochs.")
    serving.batcher.close()


def cpu_ms(call: Callable[[], object]) -> str:
    """Returns the median CPU time of this thread for a call, in ms, and in brackets the 10th percentile."""
    times = []
    for _ in range(CALLS + 20):
        start = time.thread_time()
        call()
        times.append(1000 * (time.thread_time() - start))
    return f"{median(times[20:]):.2f} ({quantiles(times[20:], n=10)[0]:.2f})"


def reader_ms() -> float:
    """Returns the CPU time in which a reader makes a batch: an epoch's, divided by the number of batches."""
    pipeline = config.prepare("configs/quickstart.config").pipeline
    loader = Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)
    count, times = loader.num_batches(), []
    for epoch in range(EPOCHS):
        start = time.thread_time()
        for index in range(count):
            loader._reader.read(epoch, index)
        times.append(1000 * (time.thread_time() - start) / count)
    return median(times[1:])


def _json(row: pa.Table, names: list[str]) -> bytes:
    return json.dumps({"rows": [{name: row[name][0].as_py() for name in names}]}).encode()


if __name__ == "__main__":
    main()
