"""Writes requests with long histories, and times them with a package in one process, without HTTP.

    python experiments/2026-11-27-serve/long_requests.py write FILE [--events 2048] [--candidates 256]
    python experiments/2026-11-27-serve/long_requests.py time FILE --package DIR [--rows 1 2 4 8] [--pause 0.2] [--warm-up]
    python experiments/2026-11-27-serve/long_requests.py steps FILE --package DIR
    python experiments/2026-11-27-serve/long_requests.py stages URL          of a server's metrics

Histories are those of many users of the KuaiRand sample, one after the other. Times are medians in ms of
calls that are each waited for, after a pause of so many seconds: whole calls of `Predictor.table`, and the model
alone, from before to after the package's program, on the GPU's clock; also the first two calls, as they come. Steps are those of a server's request of one row, in milliseconds of CPU
time of one thread.
"""

import argparse
import json
import pickle
import random
import statistics
import sys
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
SAMPLE = pq.read_table("tests/data/kuairand/test.parquet")


def write(path: Path, events: int, candidates: int, rows: int = 64) -> None:
    """Writes rows whose events and candidates are drawn from those of the sample."""
    source, draw, written = SAMPLE.to_pylist(), random.Random(0), []
    pools = {name: [v for row in source for v in row[name]] for name in source[0] if "_" in name and isinstance(source[0][name], list)}
    for number in range(rows):
        row = dict(source[number % len(source)])
        for name, pool in pools.items():
            row[name] = draw.choices(pool, k=events if name.startswith("uih_") else candidates)
        row["uih_timestamps"] = [row["request_time"] - 600 * (events - i) for i in range(events)]
        row["candidate_timestamps"] = [row["request_time"]] * candidates
        written.append(row)
    pq.write_table(pa.Table.from_pylist(written, SAMPLE.schema), path)


def time_calls(path: Path, folder: Path, repeats: int, sizes: list[int], pause: float, warm_up: bool) -> None:
    """Prints the times of calls with each number of rows."""
    environment.import_torchrec_quietly()
    from recsys.inference.package import Package
    from recsys.inference.predictor import Predictor
    from recsys.inference.requests import for_requests

    start = time.perf_counter()
    package = Package(folder)
    print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)
    on_gpu = package.description.device == "cuda"
    if warm_up:
        start = time.perf_counter()
        package.warm_up()
        print(f"warmed up in {1000 * (time.perf_counter() - start):.0f} ms", flush=True)
    predictor, run, spans = Predictor(package, for_requests(package.pipeline, None)), package.run, []

    def timed(*arguments):
        if not on_gpu:
            start = time.perf_counter()
            result = run(*arguments)
            spans.append(1000 * (time.perf_counter() - start))
            return result
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        result = run(*arguments)
        pair[1].record()
        pair[1].synchronize()
        spans.append(pair[0].elapsed_time(pair[1]))
        return result

    package.run = timed
    table = pq.read_table(path)
    for rows in sizes:
        taken = []
        spans.clear()
        for repeat in range(repeats + 5):
            part = table.slice(repeat * rows % (table.num_rows - rows), rows)
            time.sleep(pause)
            start = time.perf_counter()
            predictor.table(part)
            taken.append(1000 * (time.perf_counter() - start))
        first = " and ".join(f"{value:.1f}" for value in taken[:2])
        print(f"{rows} rows: whole call {statistics.median(taken[5:]):.2f} ms, first two {first}, model {statistics.median(spans[5:]):.2f}", flush=True)


def time_steps(path: Path, folder: Path, repeats: int) -> None:
    """Prints the CPU time of each step of a request of one row, without HTTP."""
    environment.import_torchrec_quietly()
    from pydantic_core import to_json
    from recsys.inference.package import Package
    from recsys.data.schema.contract import file_columns
    from recsys.serving.arrow_schema import ArrowSchema
    from recsys.serving.batch_scorer import _ORIGIN, BatchScorer
    from recsys.serving.model import Prepared, row_batch, schema_of
    from recsys.serving.rows import ArrowRows, JsonRows
    from recsys.serving.schema import RequestLimits
    from scripts.bench_http import arrow_stream

    scorer = BatchScorer(Package(folder))
    limits = RequestLimits(64, 10_000, 10_000)
    schema = schema_of(scorer.loaded, limits)
    columns = ArrowSchema(file_columns(scorer.loaded.pipeline, "predict"), schema.keys, limits)
    names = schema.request.model_json_schema()["$defs"]["Row"]["properties"]
    table = pq.read_table(path)
    table = table.select([name for name in table.column_names if name in names])
    taken: dict[str, list[float]] = {}
    differences: list[float] = []

    def step(name, function, *arguments):
        start = time.thread_time()
        result = function(*arguments)
        taken.setdefault(name, []).append(1000 * (time.thread_time() - start))
        return result

    def scored(form: str, rows) -> dict:
        batch = step(f"{form}: columns to send", row_batch, schema, [Prepared(rows, 0, range(1))], False)
        sent = step(f"{form}: pickled", pickle.dumps, batch)
        received = step(f"{form}: unpickled", pickle.loads, sent)
        made = step(f"{form}: made a table", scorer._tables.table, received.columns, received.streams)
        block = step(f"{form}: checked and converted", scorer._predictor.convert, made, _ORIGIN)
        return step(f"{form}: scored", scorer._score, block)

    for number in range(repeats):
        row = table.slice(number % table.num_rows, 1)
        body, stream = json.dumps({"rows": row.to_pylist()}).encode(), arrow_stream(row)
        request = step("JSON: read and checked by pydantic", schema.parse, body)
        answered = scored("JSON", JsonRows(schema, request.rows))
        rows = step("Arrow: read and checked", lambda stream=stream: ArrowRows(columns.parse(stream)))
        again = scored("Arrow", rows)
        differences.append(max(abs(a - b) for name in answered for a, b in zip(answered[name][0], again[name][0], strict=True)))
        answer = {"rows": [{"candidates": rows.values("candidate_item_id")[0]} | {name: values[0] for name, values in answered.items()}]}
        step("answer by json.dumps", json.dumps, answer)
        step("answer by pydantic", to_json, answer)
    print(f"{len(body) / 1000:.1f} KB of JSON, {len(stream) / 1000:.1f} KB of Arrow; largest difference of the answers: {differences[0]:.1e} for the first row, then {max(differences[1:]):.1e}")
    for name, times in taken.items():
        print(f"{name}: {statistics.median(times[5:]):.3f} ms")


def print_stages(url: str) -> None:
    """Prints the mean milliseconds of a batch's stages, and of requests, from a server's metrics."""
    with urllib.request.urlopen(url) as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    for name, total in values.items():
        if name.startswith(("recsys_batch_seconds_sum", 'recsys_request_seconds_sum{route="/score"')):
            count = values[name.replace("_sum", "_count")]
            print(f"{name.replace('_seconds_sum', '')}: {1000 * total / count:.2f} ms, mean of {count:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "time", "steps", "stages"])
    parser.add_argument("file")
    parser.add_argument("--package", type=Path)
    for name, default in (("events", 2048), ("candidates", 256), ("repeats", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    if options.action == "write":
        write(Path(options.file), options.events, options.candidates)
    elif options.action == "stages":
        print_stages(options.file)
    elif options.action == "steps":
        time_steps(Path(options.file), options.package, options.repeats)
    else:
        time_calls(Path(options.file), options.package, options.repeats, options.rows, options.pause, options.warm_up)
    return 0


if __name__ == "__main__":
    sys.exit(main())
