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
  ... eager  one pass and warm, without recorded CUDA graphs (only on a GPU)

On a GPU, further columns have the time of the model alone (from before to after `run` or `score`, on the GPU's clock)
and of its kernels and copies alone (their sum in a trace of one call).
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


class Timed:
    """Calls a function and keeps the GPU's time from before to after each call, in ms."""

    def __init__(self, function):
        self.function, self.events = function, []

    def __call__(self, *arguments):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        result = self.function(*arguments)
        pair[1].record()
        self.events.append(pair)
        return result

    def take(self) -> list[float]:
        """Returns the times of the calls since the last time."""
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in self.events]
        self.events.clear()
        return times


def time_of_kernels(call) -> float:
    """Returns the sum of the times of kernels and copies of a call, in ms."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in on_gpu) / 1000


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
    from recsys.scoring.recorded import RecordedScoring

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
    chooses, StoredScores._measure = StoredScores._measure, lambda *_: None  # every way is forced here
    # On a CPU, the time that the process had a core: others may share the machine.
    clock = time.perf_counter if package.description.device == "cuda" else time.process_time
    store, usual, on_gpu = stored.stored.store, scorer.ONE_PASS, package.description.device == "cuda"
    ways = ["one pass", "without", "new", "grown", "warm"]
    ways += ["host", "one pass eager", "warm eager"] if on_gpu else []
    alone: dict[str, list[float]] = {way: [] for way in ways}
    if on_gpu:
        package.run, package.score = Timed(package.run), Timed(package.score)
    replays = RecordedScoring._sizes
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    scores: dict[str, list[np.ndarray]] = {way: [] for way in ways}
    requests = rows_of(options.events, options.candidates, options.request)

    def predictor_for(way: str, row: dict) -> Predictor:
        """Prepares the store and the switches for a way."""
        if way in ("new", "grown"):
            for tier in store._tiers:
                tier.pop(row["user_id"])
        if way == "grown":
            stored.table(table_of(row, fewer=1))
        if way == "host":
            user = store._tiers[0].pop(row["user_id"])
            store._tiers[1].add(row["user_id"], user)
        scorer.ONE_PASS = 10**9 if way.startswith("one pass") else usual
        RecordedScoring._sizes = (lambda *_: None) if way.endswith("eager") else replays
        return plain if way.startswith(("one pass", "without")) else stored

    for repeat in range(options.repeats + 2):
        for row in requests:
            for way in ways:
                predictor, table = predictor_for(way, row), table_of(row)
                if on_gpu:
                    package.run.take(), package.score.take()
                start = clock()
                answer = predictor.table(table)
                taken = clock() - start
                if repeat > 1:  # the first rounds warm up, and record graphs
                    seconds[way].append(taken)
                    alone[way].append(sum([*package.run.take(), *package.score.take()]) if on_gpu else 0.0)
                    scores[way].append(
                        answer[package.description.outputs[0]].combine_chunks().flatten().to_numpy()
                    )
    print(
        f"{package.description.device}: {options.events} events, {options.candidates} candidates in requests of "
        f"{options.request}; a user takes {store.num_bytes / 2**20:.1f} MiB; rows {dict(stored.stored.rows)}"
    )
    bases = ["one pass", *(["one pass eager"] if on_gpu else [])]
    for way in ways:
        apart = max(np.abs(a - b).max() for a, b in zip(scores[way], scores["one pass"], strict=True))
        line = f"{way:14} {1000 * statistics.median(seconds[way]):8.2f} ms"
        for base in bases:
            pairs = zip(seconds[base], seconds[way], strict=True)
            line += f", {statistics.median(a / b for a, b in pairs):5.2f} x {base}"
        if on_gpu:
            model = statistics.median(alone[way])
            of_model = [f"{statistics.median(alone[base]) / model:.2f} x {base}" for base in bases]
            predictor = predictor_for(way, requests[-1])
            kernels = time_of_kernels(lambda p=predictor: p.table(table_of(requests[-1])))
            line += f"; model alone {model:.3f} ms, {', '.join(of_model)}; kernels {kernels:.3f} ms"
        print(f"{line}; differs by {apart:.1e}")
    RecordedScoring._sizes, StoredScores._measure, scorer.ONE_PASS = replays, chooses, usual
    chosen = Predictor(package, with_store)
    for row in requests:
        chosen.table(table_of(row))
    print(f"by itself: the store is faster {list(chosen.stored.is_faster.values())}, rows {dict(chosen.stored.rows)}")


if __name__ == "__main__":
    main()
