"""Times a `Predictor` call of one row by the clock, and a full garbage collection with the package loaded.

python experiments/2026-11-27-serve/calls.py --package runs/quickstart/export
"""

import argparse
import gc
import time
from pathlib import Path

import pyarrow.parquet as pq

from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.serving import server  # noqa: F401  what a server has imported is part of a collection

ROWS, CALLS = "tests/data/kuairand/test.parquet", 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    predictor = Predictor(Package(parser.parse_args().package))
    row = pq.read_table(ROWS).slice(100, 1).combine_chunks()
    times = sorted(milliseconds(lambda: predictor.table(row)) for _ in range(CALLS))
    print(f"a call: median {times[CALLS // 2]:.2f} ms, 90th percentile {times[CALLS * 9 // 10]:.2f} ms")
    print(f"a full collection: {milliseconds(gc.collect):.0f} ms for {len(gc.get_objects()):,} objects")


def milliseconds(call):
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
