#!/usr/bin/env python3
"""Measures training steps on the ranks that torchrun starts, and how speed grows with their number.

    python scripts/bench_scaling.py --record scaling.json
    torchrun --standalone --nproc-per-node 2 scripts/bench_scaling.py --record scaling.json
    python scripts/bench_scaling.py --config FILE [--set PATH=VALUE ...] [--case NAME ...] [--steps N]

The steps are those of `recsys.train` on generated rows: reader processes, TorchRec's pipeline, sharded
tables, both optimizers. A rank has the same number of rows whatever the number of ranks (weak scaling). The
cases differ in the lengths of histories; the last has another model:

  equal     32 rows of 2,048 events a rank
  uniform   32 rows of 1 to 4,096 events
  zipf      320 rows of 1 to 4,096 events, with probabilities proportional to n^-1.2
  kuairand  the model of configs/kuairand_ranking.config on 128 rows of up to 200 events

On several ranks, cases with different lengths are measured twice: as rows are read, and with
train.balance_ranks. The record has the time of a step, tokens and useful FLOP per second, the share of time
that rank 0 waited for its batches, and the largest peak memory of a rank. `straggler` is the FLOP of the rank
that has most over the mean of all ranks, averaged over steps. `efficiency` is the FLOP per second of a rank
over those of a run with 1 rank in the same file. New results are added to those in the file.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.errors import ConfigError, RecsysError
from recsys.flags import Parser, positive
from recsys.training.distributed import Processes, gather, process_group
from recsys.training.session import Session, open_session
from recsys.training.throughput import Meter, peak_memory
from recsys.training.trainer import step_pipeline
from scripts import bench_records
from scripts.step_variants import HASHED_ROWS

ROOT = Path(__file__).resolve().parent.parent
MANY_STEPS = 100_000
"""Steps of a run, which is never trained to its end."""

BASE = Path(__file__).with_suffix(".config")
CASES = {
    "equal": (),
    "uniform": ("data.train.synthetic.min_history_len=1", "data.train.synthetic.max_history_len=4096"),
    "zipf": (
        "data.batch_size=320",
        "data.train.synthetic.num_rows=40960",
        "data.train.synthetic.min_history_len=1",
        "data.train.synthetic.max_history_len=4096",
        "data.train.synthetic.history_len_exponent=1.2",
    ),
    "kuairand": ("data.train.synthetic={num_rows: 16384 max_history_len: 200 max_candidates: 10}",),
}
"""Changes of the config by case."""


@dataclass(frozen=True)
class Record:
    """The results of a case on some number of ranks; None if a value is unknown."""

    case: str
    ranks: int
    balanced: bool
    device: str
    backend: str
    rows: int
    steps: int
    ms: float
    samples_per_s: float
    tokens_per_s: float
    tflops_per_rank: float
    straggler: float
    data_wait: float
    peak_mb: float
    efficiency: float | None
    loss: float
    commit: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the cases; see the head of this file."""
    options = _options(arguments)
    environment.import_torchrec_quietly()
    records: list[Record] = []
    try:
        with process_group() as processes:
            for name, balanced in measured(options.case or CASES, processes.world_size):
                pipeline = case_of(options.config, name, options.overrides)
                pipeline.train.balance_ranks = balanced
                record = measure(name, pipeline, options, processes)
                record = replace(record, efficiency=efficiency(record, options.record))
                records.append(record)
                if processes.is_main:
                    print(line_of(record), flush=True)
                    bench_records.write(options.record, [record], grow=True)
                dist.barrier()
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def measured(cases: Iterable[str], ranks: int) -> Iterator[tuple[str, bool]]:
    """Yields the cases to measure, with whether ranks exchange rows."""
    for name in dict.fromkeys(cases):
        yield name, False
        if ranks > 1 and name != "equal":
            yield name, True


def case_of(path: Path, name: str, overrides: Sequence[str]) -> pb.Pipeline:
    """Returns the resolved config of a case.

    Raises:
        ConfigError: the config cannot be used.
    """
    if name == "kuairand":
        path = ROOT / "configs" / "kuairand_ranking.config"
    pipeline = config.load(path, [*CASES[name], *overrides])
    for field in ("validation", "test", "vocabulary_dir"):
        pipeline.data.ClearField(field)
    for feature in pipeline.features:
        if feature.id.HasField("vocabulary"):
            feature.id.hash.num_buckets = HASHED_ROWS
    pipeline.train.num_steps = MANY_STEPS
    pipeline.train.ClearField("evaluation")
    if findings := config.check(pipeline):
        raise ConfigError([f"{name}: {finding}" for finding in findings])
    return config.resolve(pipeline, read_files=False).pipeline


def measure(name: str, pipeline: pb.Pipeline, options: argparse.Namespace, processes: Processes) -> Record:
    """Trains some steps of a case and returns what they cost. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        try:
            return _measure(name, session, options)
        finally:
            del session
            gc.collect()
            if processes.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def _measure(name: str, session: Session, options: argparse.Namespace) -> Record:
    device, ranks = session.processes.device, session.processes.world_size
    flop: list[int] = []
    meter = Meter()
    runner = step_pipeline(session)
    # A prefetched batch is counted when it is read, so the costs are those of the last `steps` batches.
    with closing(_counted(session, flop)) as batches:
        stream = meter.watch(batches)
        for _ in range(options.warmup):
            runner.progress(stream).wait()
        _meet(device)
        meter.take()
        began, previous = time.perf_counter(), None
        for _ in range(options.steps):
            pending = runner.progress(stream)
            if previous is not None:
                result = previous.wait()
                meter.add(result.samples, result.tokens, result.flop)
            previous = pending
        result = previous.wait()
        meter.add(result.samples, result.tokens, result.flop)
        _meet(device)
        seconds = max(gather(time.perf_counter() - began))
        rates = meter.take()
    by_rank = gather(flop[: options.warmup + options.steps][options.warmup :])
    stragglers = [max(step) * ranks / sum(step) for step in zip(*by_rank, strict=True)]
    scale = rates.batches_per_s * seconds / options.steps
    return Record(
        case=name,
        ranks=ranks,
        balanced=session.pipeline.train.balance_ranks,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        backend=dist.get_backend(),
        rows=session.pipeline.data.batch_size,
        steps=options.steps,
        ms=1e3 * seconds / options.steps,
        samples_per_s=rates.samples_per_s / scale,
        tokens_per_s=rates.tokens_per_s / scale,
        tflops_per_rank=rates.flop_per_s / scale / ranks / 1e12,
        straggler=statistics.mean(stragglers),
        data_wait=rates.data_wait,
        peak_mb=max(gather(peak_memory(device))) / 2**20,
        efficiency=None,
        loss=result.loss,
        commit=options.commit or bench_records.current_commit(),
    )


def _counted(session: Session, flop: list[int]) -> Iterator[Batch]:
    """Yields the rank's batches and appends the FLOP of each to `flop`."""
    with closing(session.batches()) as batches:
        for batch in batches:
            flop.append(3 * session.model.flops(batch))
            yield batch


def _meet(device: torch.device) -> None:
    """Waits for this rank's device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def efficiency(record: Record, path: Path | None) -> float | None:
    """Returns the FLOP per second of a rank over those of the newest run with 1 rank in a file of records."""
    if record.ranks == 1 or path is None or not path.exists():
        return None
    alone = [
        entry["tflops_per_rank"]
        for entry in json.loads(path.read_text())
        if (entry["case"], entry["ranks"], entry["device"]) == (record.case, 1, record.device)
    ]
    return record.tflops_per_rank / alone[-1] if alone else None


def line_of(record: Record) -> str:
    """Formats a record as one line."""
    share = "" if record.efficiency is None else f", {record.efficiency:.1%} of linear"
    name = f"{record.case}, balanced" if record.balanced else record.case
    return (
        f"{name}, {record.ranks} x {record.rows} rows: {record.ms:.1f} ms, "
        f"{record.tokens_per_s:,.0f} tokens/s, {record.tflops_per_rank:.1f} TFLOP/s a rank{share}, "
        f"straggler {record.straggler:.2f}, data wait {record.data_wait:.1%}, peak {record.peak_mb:,.0f} MiB"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, default=BASE)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--case", action="append", choices=[*CASES], help="may be repeated; default: all")
    for name, value, meaning in (("steps", 30, "measured"), ("warmup", 10, "earlier, unmeasured")):
        parser.add_argument(
            f"--{name}", type=positive, default=value, help=f"{meaning} steps; default: {value}"
        )
    parser.add_argument("--record", type=Path, help="file to which the results are added")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
