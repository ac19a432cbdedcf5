"""Rows a second of `recsys.predict` on long histories, untrained weights, made-up rows.

    python experiments/2026-11-22-gpu-serving/predict.py FOLDER [--how package] [--users 64] ...

Each user has --requests neighbouring rows with the same time and history, and other candidates. `--how model`
(the default) runs the model itself where a package would run, and needs no export; `--how package` exports
FOLDER/export, unless it is there, and predicts with it.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import config
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.inference import exporter
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.models import Ranker, build_model
from scripts.serving_ways import draw_weights

ROOT, NOW = Path(__file__).resolve().parents[2], 1_750_000_000


def rows(users: int, requests: int, history: int, candidates: int) -> pa.Table:
    """The table."""
    draw, count = np.random.default_rng(0), users * requests
    shortest = max(history // 2, 1)
    events = draw.integers(shortest, history + 1, users)
    at = np.repeat(np.arange(users), requests)
    starts = np.concatenate([[0], np.cumsum(events)])

    def of_users(values: np.ndarray) -> pa.Array:
        lists = np.split(values, starts[1:-1])
        joined = np.concatenate([lists[user] for user in at])
        return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(events[at])]).astype(np.int32), joined)

    def of_candidates(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(
            np.arange(0, count * candidates + 1, candidates, dtype=np.int32), values
        )

    total = starts[-1]
    times = np.concatenate([np.sort(draw.integers(NOW - 10**7, NOW, size)) for size in events])
    return pa.table(
        {
            "user_id": at,
            "request_id": np.arange(count),
            "request_time": np.full(count, NOW),
            "country": draw.integers(0, 300, users)[at],
            "age": draw.random(users).astype(np.float32)[at],
            "uih_item_id": of_users(draw.integers(0, 10**6, total)),
            "uih_author_id": of_users(draw.integers(0, 10**5, total)),
            "uih_timestamps": of_users(times),
            "uih_actions": of_users(draw.integers(0, 4, total)),
            "candidate_item_id": of_candidates(draw.integers(0, 10**6, count * candidates)),
            "candidate_author_id": of_candidates(draw.integers(0, 10**5, count * candidates)),
            "candidate_is_click": of_candidates(np.zeros(count * candidates, np.float32)),
            "candidate_long_view": of_candidates(np.zeros(count * candidates, np.float32)),
        }
    )


def pipeline_of(given: argparse.Namespace, table: pa.Table) -> pb.Pipeline:
    """Resolved, with the table as its data."""
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "rows.parquet"
    pq.write_table(table, path, row_group_size=1024)
    source = f'{{ parquet {{ paths: "{path}" }} }}'
    sets = [f"data.train={source}", f"data.test={source}", f"data.max_history_len={given.history}"]
    sets += ['data.key_columns=["user_id", "request_id"]', f"data.max_candidates={given.candidates}"]
    sets += ["train.num_steps=1", "data.eval_batch_size=32", "export.parity_rows=32", *given.set]
    return config.prepare(ROOT / "scripts/bench_step.config", sets).pipeline


class Itself:
    """A model where a package would be."""

    items = cached = None

    def __init__(self, model: Ranker):
        self.model, self.pipeline = model, model.pipeline
        self.device = next(model.parameters()).device
        outputs = [task.name for task in model.tasks]
        self.description = SimpleNamespace(outputs=outputs, device=self.device.type)

    @torch.no_grad()
    def run(self, batch: Batch) -> torch.Tensor:
        """As a package's."""
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return self.model.score(batch.to(self.device, non_blocking=True))


def package_of(given: argparse.Namespace, pipeline: pb.Pipeline) -> Package | Itself:
    """What predicts."""
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    draw_weights(model)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if given.how == "model":
        return Itself(model)
    folder = given.folder / "export"
    if not folder.exists():
        device, start = next(model.parameters()).device, time.perf_counter()
        batches = [batch.to(device) for batch in exporter.comparison_rows(pipeline)]
        done = exporter.export(exporter.Source(pipeline, model, 0, batches), folder)
        print(f"exported in {time.perf_counter() - start:.0f} s; {done.rows} rows: {done.difference:.1e}")
    return Package(folder)


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", choices=("model", "package"), default="model")
    for name, value in (("users", 64), ("requests", 8), ("history", 4096), ("candidates", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    table = rows(given.users, given.requests, given.history, given.candidates)
    predictor = Predictor(package_of(given, pipeline_of(given, table)))
    count = len(table) * given.candidates
    for _ in range(given.repeats):
        start = time.perf_counter()
        predictor.table(table)
        seconds = time.perf_counter() - start
        print(f"{len(table)} rows in {seconds:.3f} s: {len(table) / seconds:,.0f} rows/s, "
              f"{count / seconds:,.0f} candidates/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
