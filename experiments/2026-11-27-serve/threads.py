"""Calls one package from several threads for some time, and counts the answers that are not those of a single thread.

    python experiments/2026-11-27-serve/threads.py PACKAGE ROWS [--threads 8] [--seconds 600]

ROWS is a parquet file with the columns that the package reads. Exit code 1 says that an answer was wrong, or that a thread
did not come back within a minute after the end.
"""

import argparse
import resource
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch

from recsys.inference.package import Package
from recsys.inference.predictor import Predictor

SLICES = ((0, 1), (7, 5), (20, 40), (3, 2), (70, 1))
"""First row and number of rows of each request."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("package", type=Path)
parser.add_argument("rows", type=Path)
parser.add_argument("--threads", type=int, default=8)
parser.add_argument("--seconds", type=float, default=600)
arguments = parser.parse_args()

predictor, rows = Predictor(Package(arguments.package)), pq.read_table(arguments.rows)
tables = [rows.slice(start, length) for start, length in SLICES]
# A GPU replays a recorded graph from the third call with equal sizes on, whose last bits may be others.
answers = [[predictor.table(table) for _ in range(3)][-1] for table in tables]
counts, wrong = [0] * arguments.threads, [0] * arguments.threads
begin = time.monotonic()


def ask(thread: int) -> None:
    turn = thread
    while time.monotonic() < begin + arguments.seconds:
        turn += 1
        if not predictor.table(tables[turn % len(tables)]).equals(answers[turn % len(tables)]):
            wrong[thread] += 1
        counts[thread] += 1


def memory() -> str:
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    device = torch.cuda.max_memory_reserved() >> 20 if torch.cuda.is_available() else 0
    return f"{host:,} MiB of the host and {device:,} MiB of the GPU at most"


before = memory()
threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(arguments.threads)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(max(begin + arguments.seconds + 60 - time.monotonic(), 0))
late = sum(thread.is_alive() for thread in threads)
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(f"{sum(counts):,} calls from {len(threads)} threads in {time.monotonic() - begin:.0f} s on {device}, ", end="")
print(f"{min(counts):,} to {max(counts):,} each: {sum(wrong)} wrong answers, {late} threads that hang")
print(f"memory: {before} before, {memory()} after")
sys.exit(int(late > 0 or sum(wrong) > 0))
