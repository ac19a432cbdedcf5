#!/usr/bin/env python3
"""Measures the speed on a CPU against references in the same run, so that other machines can check it.

    .venv/bin/python scripts/bench_cpu.py [SECTION ...]

reader: rows/s of the loader with 2 reader processes, epoch after epoch, against pyarrow that only decodes the
    same file repeatedly in one process, with as many threads as there are reader processes.
ranking-step, retrieval-step: time of a training step on jagged data, against the same model on padded data.
import: seconds of `import recsys` after torch has been imported.

Each section prints one line. The exit code is 1 if a section misses its bar.
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from google.protobuf import text_format
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.data.batch import Batch, LayoutRule
from recsys.data.loader import Loader
from recsys.data.sources import open_source
from recsys.models import build_model, layout_rule
from recsys.models.base import Losses
from scripts.padded_model import JaggedModel, PaddedBatch, PaddedModel, pad

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 3


class Result(NamedTuple):
    """The result of a section.

    `value` must be at least `bar` in the unit "x" (ours over the reference), and at most `bar` in "s".
    """

    name: str
    detail: str
    value: float
    bar: float
    unit: str = "x"

    @property
    def good(self) -> bool:
        """Returns whether the value meets the bar."""
        return self.value >= self.bar if self.unit == "x" else self.value <= self.bar


# The reader: all columns checked and converted.

READER_ROWS, READER_REPEATS = 163_840, 5
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
  id { vocabulary { file: "%(vocabulary)s" size: %(size)d } table: "item_id" } }
features { name: "author_id" sides: HISTORY sides: CANDIDATE
  id { hash { num_buckets: 50000 } table: "author_id" } }
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
    """Measures rows/s of `Loader.epochs` over those of plain pyarrow; both have read the file before.

    Plain pyarrow is the faster of `dataset(file).to_batches()` and `ParquetFile(file).iter_batches` with our
    batch size. It only decodes: it checks no checksums, converts nothing, and keeps the order of the rows.
    Loader and pyarrow take turns, and each pair gives a ratio, so that other load affects both. The result
    is the median.
    """
    pipeline = _reader_file(folder)
    loader = Loader.open(pipeline, "train", LayoutRule(num_contextual=2), shuffle=True)
    path, data = pipeline.data.train.parquet.paths[0], pipeline.data
    plain, ours = [], []
    with multiprocessing.get_context("spawn").Pool(1, _set_threads, [data.num_workers]) as pool:
        pool.apply(_plain_rates, (path, data.batch_size))
        for _ in range(READER_REPEATS):
            ours.append(_epoch_rate(loader))
            plain.append(pool.apply(_plain_rates, (path, data.batch_size)))
    of_dataset, of_file = (statistics.median(rates) for rates in zip(*plain, strict=True))
    detail = (
        f"{statistics.median(ours):,.0f} rows/s, plain pyarrow {of_dataset:,.0f} as a dataset, "
        f"{of_file:,.0f} as a file"
    )
    ratio = statistics.median(
        our_time / max(their_times) for our_time, their_times in zip(ours, plain, strict=True)
    )
    return Result("reader", detail, ratio, bar=0.5)


def _reader_file(folder: Path) -> pb.Pipeline:
    """Returns a config whose rows are in one parquet file, made by the synthetic source."""
    vocabulary = folder / "item_id.parquet"
    ids = np.random.default_rng(0).choice(10**12, 200_000, replace=False)
    pq.write_table(pa.table({"id": ids}), vocabulary)
    text = READER_CONFIG % {"rows": READER_ROWS, "vocabulary": vocabulary, "size": len(ids)}
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


def _epoch_rate(loader: Loader) -> float:
    """Returns rows/s of the second epoch. The readers are equally far ahead at its beginning and its end."""
    batches = loader.epochs()
    try:
        for _ in islice(batches, loader.num_batches(0)):
            pass
        return _rate(len(batch.request_time) for batch in islice(batches, loader.num_batches(1)))
    finally:
        batches.close()


def _set_threads(count: int) -> None:
    pa.set_cpu_count(count)


def _plain_rates(path: str, batch_size: int) -> tuple[float, float]:
    """Returns rows/s of pyarrow that only decodes, as a dataset and as a file."""
    of_dataset = _rate(batch.num_rows for batch in pads.dataset(path).to_batches())
    of_file = _rate(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(batch_size))
    return of_dataset, of_file


def _rate(rows: Iterator[int]) -> float:
    """Returns rows/s, given the number of rows of each batch."""
    start = time.perf_counter()
    count = sum(rows)
    return count / (time.perf_counter() - start)


# A training step: forward, loss, backward, AdamW.

STEP_BATCHES, STEP_REPEATS = 6, 4


def bench_step(
    folder: Path, *, name: str, path: str, num_batches: int = STEP_BATCHES, repeats: int = STEP_REPEATS
) -> Result:
    """Measures the time of a step on padded data over that on jagged data, on shuffled batches of a config.

    Both take turns, batch by batch, and each pair gives a ratio, so that other load on the machine affects
    both. The result is the median.

    Raises:
        AssertionError: loss or gradients differ.
    """
    pipeline = config.prepare(ROOT / path, ["data.num_workers=0"]).pipeline
    loader = Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)
    batches = list(islice(loader.epoch(0), num_batches))
    filled = [pad(batch, pipeline) for batch in batches]
    torch.manual_seed(0)
    model = build_model(pipeline)
    jagged_model, padded_model = JaggedModel(model), PaddedModel(model)
    check_same_gradients(jagged_model, batches[0], padded_model, filled[0])
    jagged_step, padded_step = Step(jagged_model), Step(padded_model)
    ours, theirs = [], []
    for repeat in range(repeats + 1):
        for batch, full in zip(batches, filled, strict=True):
            seconds = jagged_step.seconds(batch), padded_step.seconds(full)
            if repeat:  # the first round warms up
                ours.append(seconds[0])
                theirs.append(seconds[1])
    real = sum(batch.layout.total_len for batch in batches)
    share = real / sum(full.batch.layout.total_len for full in filled)
    detail = (
        f"{1e3 * statistics.median(ours):.1f} ms, padded {1e3 * statistics.median(theirs):.1f} ms, "
        f"{100 * share:.0f} % of the padded tokens are real"
    )
    ratios = [padded / jagged for jagged, padded in zip(ours, theirs, strict=True)]
    return Result(name, detail, statistics.median(ratios), bar=1.0)


class Step:
    """Training steps of one of the two forms."""

    def __init__(self, form: nn.Module):
        self.form = form.train()
        self.optimizer = torch.optim.AdamW(form.parameters(), lr=1e-3, fused=True)

    def seconds(self, batch: Batch | PaddedBatch) -> float:
        """Returns the time of one step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        mean_loss(self.form(batch)).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def mean_loss(losses: Losses) -> Tensor:
    """Returns the weighted sum of the tasks' mean losses, which training minimizes."""
    weights = losses.sums.new_tensor(losses.weights)
    return (weights * losses.sums / losses.counts.clamp(min=1)).sum()


def check_same_gradients(jagged: nn.Module, batch: Batch, padded: nn.Module, filled: PaddedBatch) -> None:
    """Raises AssertionError if loss or gradients of the two forms, without dropout, differ by more
    than rounding."""
    results = []
    for form, data in ((jagged.eval(), batch), (padded.eval(), filled)):
        loss = mean_loss(form(data))
        results.append([loss, *torch.autograd.grad(loss, list(form.parameters()), materialize_grads=True)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6 + 1e-4 * float(ours.detach().abs().max()))


# Import.

IMPORT = "import time, torch; start = time.perf_counter(); import recsys; print(time.perf_counter() - start)"


def bench_import(folder: Path, repeats: int = REPEATS) -> Result:
    """Returns the median seconds of `import recsys` in a new process that has imported torch."""
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", IMPORT], cwd=ROOT, check=True, stdout=subprocess.PIPE
            ).stdout
        )
        for _ in range(repeats)
    ]
    return Result(
        "import", "of recsys, without the import of torch", statistics.median(seconds), bar=1.0, unit="s"
    )


RANKING, RETRIEVAL = "configs/quickstart.config", "configs/movielens_small_retrieval.config"

SECTIONS: dict[str, Callable[[Path], Result]] = {
    "reader": bench_reader,
    "ranking-step": partial(bench_step, name="ranking-step", path=RANKING),
    "retrieval-step": partial(bench_step, name="retrieval-step", path=RETRIEVAL),
    "import": bench_import,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the sections named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    names = parser.parse_args(arguments).sections or list(SECTIONS)
    environment.import_torchrec_quietly()
    passed = True
    print(f"{torch.get_num_threads()} threads")
    print(f"{'':<15}{'measured':>10}{'bar':>10}  ")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            result = SECTIONS[name](Path(folder))
        passed &= result.good
        measured = f"{result.value:.2f} {result.unit}"
        bar = f"{'>=' if result.unit == 'x' else '<='} {result.bar:g} {result.unit}"
        verdict = "ok    " if result.good else "MISSED"
        print(f"{result.name:<15}{measured:>10}{bar:>10}  {verdict}  {result.detail}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
