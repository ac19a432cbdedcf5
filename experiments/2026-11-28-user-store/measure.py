"""Times requests of one user with and without a store of users: whole calls of `Predictor.table`, ids to scores.

    python experiments/2026-11-28-user-store/measure.py --events 2048 [--set PATH=VALUE ...] [--package DIR]

The model is that of a config on the bundled KuaiRand sample (default: the quickstart's) with random weights, or a
package of it. A user's --candidates come in requests of --request, each with the user's whole history. All ways take
the same requests in turn, and the scores are compared. Times on a CPU are of the process, not of the clock.

  one pass   history and candidates together, without a store
  without    what the library does without a store: on a CPU, a cache of the request alone from 100 candidates on
  new        the store does not have the user
  grown      it has the user with one event less
  warm       it has the user
  host       it has the user on the host (only on a GPU)
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import config, environment
from recsys import protos as pb

SAMPLE = pq.read_table("tests/data/kuairand/test.parquet")


def rows_of(events: int, candidates: int, request: int) -> list[dict]:
    """Returns the requests of a user, whose events and candidates are those of many users, one after the other."""
    rows = SAMPLE.to_pylist()
    row = dict(rows[0])
    for name in row:
        size = events if name.startswith("uih_") else candidates if name.startswith("candidate_") else 0
        if size:
            pool = [value for donor in rows for value in donor[name]]
            row[name] = (pool * (size // len(pool) + 1))[:size]
    row["uih_timestamps"] = [row["request_time"] - 600 * (events - i) for i in range(events)]
    row["candidate_timestamps"] = [row["request_time"]] * candidates
    cuts = [*range(0, candidates, request), candidates]
    names = [name for name in row if name.startswith("candidate_")]
    return [row | {name: row[name][start:stop] for name in names} for start, stop in pairwise(cuts)]


def table_of(row: dict, fewer: int = 0) -> pa.Table:
    """Returns a request, without its newest events."""
    events = {name: values[: len(values) - fewer] for name, values in row.items() if name.startswith("uih_")}
    return pa.Table.from_pylist([row | events], SAMPLE.schema)


def main() -> None:
    """Measures and prints a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/quickstart.config")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--package", type=Path)
    for name, default in (("events", 2048), ("candidates", 2048), ("request", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    environment.import_torchrec_quietly()
    from recsys.inference.eager import EagerPackage
    from recsys.inference.package import Package
    from recsys.inference.predictor import Predictor
    from recsys.inference.stored_scores import StoredScores
    from recsys.models import build_model
    from recsys.scoring import scorer

    if options.package:
        package = Package(options.package)
    else:
        lengths = [f"data.max_history_len={options.events}", f"data.max_candidates={options.request}"]
        pipeline = config.prepare(options.config, [*lengths, *options.overrides]).pipeline
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        package = EagerPackage(build_model(pipeline).to(device).eval())
    with_store, without_store = pb.Pipeline(), pb.Pipeline()
    for copy in (with_store, without_store):
        copy.CopyFrom(package.pipeline)
    without_store.predict.ClearField("user_store")
    with_store.predict.user_store.host_mib = with_store.predict.user_store.device_mib = 8192
    plain, stored = Predictor(package, without_store), Predictor(package, with_store)
    StoredScores._measure = lambda *_: None  # every way is forced here
    # On a CPU, the time that the process had a core: others may share the machine.
    clock = time.perf_counter if package.description.device == "cuda" else time.process_time
    store, usual, on_gpu = stored.stored.store, scorer.ONE_PASS, package.description.device == "cuda"
    ways = ["one pass", "without", "new", "grown", "warm", *(["host"] if on_gpu else [])]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    scores: dict[str, list[np.ndarray]] = {way: [] for way in ways}
    requests = rows_of(options.events, options.candidates, options.request)
    for repeat in range(options.repeats + 1):
        for row in requests:
            for way in ways:
                if way in ("new", "grown"):
                    for tier in store._tiers:
                        tier.pop(row["user_id"])
                if way == "grown":
                    stored.table(table_of(row, fewer=1))
                if way == "host":
                    user = store._tiers[0].pop(row["user_id"])
                    store._tiers[1].add(row["user_id"], user)
                table = table_of(row)
                scorer.ONE_PASS = 10**9 if way == "one pass" else usual
                predictor = plain if way in ("one pass", "without") else stored
                start = clock()
                answer = predictor.table(table)
                if repeat:  # the first round warms up
                    seconds[way].append(clock() - start)
                    scores[way].append(
                        answer[package.description.outputs[0]].combine_chunks().flatten().to_numpy()
                    )
    print(
        f"{package.description.device}: {options.events} events, {options.candidates} candidates in requests of "
        f"{options.request}; a user takes {store.num_bytes / 2**20:.1f} MiB; rows {dict(stored.stored.rows)}"
    )
    for way in ways:
        ratio = statistics.median(a / b for a, b in zip(seconds["one pass"], seconds[way], strict=True))
        apart = max(np.abs(a - b).max() for a, b in zip(scores[way], scores["one pass"], strict=True))
        print(
            f"{way:9} {1000 * statistics.median(seconds[way]):8.2f} ms, {ratio:5.2f} x one pass; differs by {apart:.1e}"
        )


if __name__ == "__main__":
    main()
