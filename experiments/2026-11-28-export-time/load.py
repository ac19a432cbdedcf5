"""Prints when the parts of loading and using a package are done, and where loading spends its time.

    python experiments/2026-11-28-export-time/load.py PACKAGE ROWS.parquet
"""

import cProfile
import pstats
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()


def say(what: str) -> None:
    print(f"{time.perf_counter() - BEGIN:6.1f} s: {what}", flush=True)


import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402

say("torch")
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    say("CUDA")

from recsys import environment  # noqa: E402

environment.import_torchrec_quietly()
say("torchrec")

from recsys.inference.package import Package  # noqa: E402
from recsys.inference.predictor import Predictor  # noqa: E402
from recsys.inference.requests import for_requests  # noqa: E402

say("recsys")
profiler = cProfile.Profile()
package = profiler.runcall(Package, Path(sys.argv[1]))
say("package")
pstats.Stats(profiler).sort_stats("tottime").print_stats(8)
predictor, table = Predictor(package, for_requests(package.pipeline, None)), pq.read_table(sys.argv[2])
for number in range(3):
    predictor.table(table.slice(0, 1))
    say(f"call {number + 1}")
