#!/usr/bin/env python3
"""Measures time, memory and useful TFLOP/s of a training step on long histories, by kind of attention.

    python scripts/bench_step.py [--history 8192] [--batch 8] [--variant NAME ...] [--record FILE]
    python scripts/bench_step.py --config configs/ml_1m_ranking.config --history 2048 [--set PATH=VALUE ...]

The model is that of a ranking config (default: bench_step.config beside this file), with its stack in these
variants, all with the same number of layers of the same width:

  full                          every layer sees everything
  semi-local                    every layer has --window and --prefix
  truncation                    after --split-layer layers, only the newest --tail events remain
  semi-local truncation         both
  channels                      two stacks, each on half of the events
  channels semi-local truncation

Every history has --history generated events, and every row --candidates candidates. Id features become
hashes, so no data is needed. A variant's loss and gradients are checked before it is timed, on rows of at
most 512 events, of which a truncation keeps a quarter: the error of its backend in the model's precision,
against the reference backend in float32, may be twice that of the reference backend in the model's
precision. Then the variants take turns, step by step (forward, loss, backward, AdamW), and ratios are
medians over pairs. Useful FLOP are three times those of a forward pass over real tokens and visible pairs.
Memory is the peak of a step, including weights and optimizer state. `--record` writes a list with one entry
per variant.

The script runs on CUDA if available. The exit code is 1 if a variant is wrong or does not fit into memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.errors import RecsysError
from recsys.flags import Parser, positive
from recsys.models import Model, build_model, layout_rule
from scripts import bench_records
from scripts.bench_cpu import mean_loss
from scripts.step_variants import BATCHES, VARIANTS, Shape, variant_of

FACTOR = 2.0
"""Largest allowed error of a backend relative to the reference's error in the model's precision."""

CHECKED_EVENTS, CHECKED_TAIL = 512, 4
"""Longest history of the rows that are compared, and the share of it that a truncation may leave at most."""


@dataclass(frozen=True)
class Record:
    """The results of a variant, None if a value is unknown; `speedup` is the time of "full" over its own."""

    variant: str
    backend: str
    device: str
    precision: str
    history: int
    batch: int
    tokens: int
    num_layers: int
    embedding_dim: int
    ms: float | None
    speedup: float | None
    useful_gflop: float
    tflops: float | None
    peak_mb: float | None
    ok: bool
    commit: str


def batches_of(pipeline: pb.Pipeline, device: torch.device) -> list[Batch]:
    """Returns the batches that a training run would get."""
    loader = Loader.open(pipeline, "train", layout_rule(pipeline))
    return [batch.to(device) for batch in islice(loader.epoch(0), BATCHES)]


def error_of(base: pb.Pipeline, name: str, shape: Shape, device: torch.device) -> float:
    """Returns the largest error of loss and gradients relative to the allowed one; above 1 is wrong."""
    history = min(shape.history, CHECKED_EVENTS)
    short = replace(shape, history=history, batch=2, tail=min(shape.tail, max(1, history // CHECKED_TAIL)))
    pipeline = variant_of(base, name, short)
    batch = batches_of(pipeline, device)[0]
    results = []
    for backend, precision in (
        (shape.backend, pipeline.model.precision),
        ("reference", pipeline.model.precision),
        ("reference", pb.FP32),
    ):
        variant = variant_of(base, name, replace(short, backend=backend))
        variant.model.precision = precision
        torch.manual_seed(0)
        results.append(loss_and_gradients(build_model(variant).to(device).eval(), batch))
    everything = float(torch.cat([part.flatten() for part in results[2]]).norm())
    worst = 0.0
    for got, reference, right in zip(*results, strict=True):
        norm = float(right.norm())
        allowed = FACTOR * float((reference - right).norm()) + 1e-3 * norm + 1e-6 * everything
        error = float((got - right).norm()) / max(allowed, 1e-30)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def loss_and_gradients(model: Model, batch: Batch) -> list[Tensor]:
    """Returns the loss and all gradients, without dropout, in float32."""
    loss = mean_loss(model.objective(model(batch), batch))
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return [loss.detach().float()[None], *(gradient.float() for gradient in gradients)]


class Runner:
    """A variant's model, optimizer and batches on the device.

    Attributes:
        flop: useful FLOP of a step, mean over batches.
        tokens: tokens of a step, mean over batches.
        peak_bytes: peak memory of a step; None on a CPU.
        times: ms of the measured steps.
    """

    def __init__(self, pipeline: pb.Pipeline, device: torch.device):
        self.device = device
        baseline_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.batches = batches_of(pipeline, device)
        torch.manual_seed(0)
        self.model = build_model(pipeline).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.flop = statistics.mean(3 * self.model.flops(batch) for batch in self.batches)
        self.tokens = round(statistics.mean(batch.sequences.total_len for batch in self.batches))
        self.times: list[float] = []
        self.peak_bytes = None
        self.step(0)  # kernels are compiled; the optimizer makes its state
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.step(1)
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - baseline_bytes

    def step(self, number: int) -> float:
        """Runs a training step and returns its milliseconds."""
        # Every batch of a training run is new: nothing has been derived from its layout yet.
        batch = self.batches[number % len(self.batches)].to(self.device)
        self._wait()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        mean_loss(self.model.objective(self.model(batch), batch)).backward()
        self.optimizer.step()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build(base: pb.Pipeline, name: str, shape: Shape, device: torch.device) -> Runner | None:
    """Builds a variant for timing; returns None, with a line on stderr, if it is wrong or too large."""
    try:
        error = error_of(base, name, shape, device)
        if not error <= 1:
            print(f"{name}: {error:.2f} times the allowed error", file=sys.stderr)
            return None
        return Runner(variant_of(base, name, shape), device)
    except torch.OutOfMemoryError as full:
        print(f"{name}: {str(full).splitlines()[0]}", file=sys.stderr)
    return None


def bench(
    base: pb.Pipeline, names: Sequence[str], shape: Shape, device: torch.device, repeats: int
) -> dict[str, Runner | None]:
    """Times the variants in turn."""
    runners = {name: build(base, name, shape, device) for name in names}
    ready = [runner for runner in runners.values() if runner is not None]
    for number in range(repeats):
        for runner in ready:
            runner.times.append(runner.step(number))
    return runners


def record_of(
    name: str, runner: Runner | None, full: Runner | None, pipeline: pb.Pipeline, shape: Shape, commit: str
) -> Record:
    """Collects the results of a variant."""
    stacks = [entry.hstu for entry in pipeline.model.ranker.mixer.mixture.stacks]
    stack = (stacks or [pipeline.model.ranker.mixer.hstu])[0]
    ms = statistics.median(runner.times) if runner else None
    speedup = None
    if runner and full:
        speedup = statistics.median(
            slow / time_of_runner for slow, time_of_runner in zip(full.times, runner.times, strict=True)
        )
    return Record(
        variant=name,
        backend=shape.backend,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        precision=pb.Precision.Name(pipeline.model.precision).lower(),
        history=shape.history,
        batch=shape.batch,
        tokens=runner.tokens if runner else 0,
        num_layers=sum(group.num_layers for group in stack.layer_groups),
        embedding_dim=pipeline.model.embedding_dim,
        ms=ms,
        speedup=speedup,
        useful_gflop=runner.flop / 1e9 if runner else 0.0,
        tflops=runner.flop / ms / 1e9 if runner and ms else None,
        peak_mb=runner.peak_bytes / 2**20 if runner and runner.peak_bytes is not None else None,
        ok=runner is not None,
        commit=commit,
    )


def table(records: Sequence[Record]) -> str:
    """Formats one line per variant."""
    columns = (("ms", 1), ("speedup", 2), ("useful_gflop", 1), ("tflops", 2), ("peak_mb", 0))
    width = max(len(record.variant) for record in records)
    lines = [f"{'':<{width}}" + "".join(f"{name:>14}" for name, _ in columns)]
    for record in records:
        values = [(getattr(record, name), digits) for name, digits in columns]
        numbers = "".join(
            f"{'-' if value is None else format(value, f',.{digits}f'):>14}" for value, digits in values
        )
        lines.append(f"{record.variant:<{width}}{numbers}{'' if record.ok else '  FAILED'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the variants; see the head of this file."""
    options = _options(arguments)
    environment.import_torchrec_quietly()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = options.backend or ("auto" if device.type == "cuda" else "reference")
    names = list(dict.fromkeys(options.variant or VARIANTS))
    shape = Shape(
        options.history,
        options.batch,
        options.candidates,
        options.window,
        options.prefix,
        options.tail,
        options.split_layer,
        backend,
    )
    try:
        base = config.load(options.config, options.overrides)
        pipelines = {name: variant_of(base, name, shape) for name in names}
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    runners = bench(base, names, shape, device, options.repeats)
    commit = options.commit or bench_records.current_commit()
    full = runners.get("full")
    records = [record_of(name, runners[name], full, pipelines[name], shape, commit) for name in names]
    print(
        f"{device.type}, {backend}, {records[0].precision}, {records[0].num_layers} layers of width "
        f"{records[0].embedding_dim}, {shape.batch} rows of {shape.history:,} events and "
        f"{shape.candidates} candidates, window {shape.window}, prefix {shape.prefix}, tail {shape.tail}"
    )
    print(table(records))
    bench_records.write(options.record, records)
    return 0 if all(record.ok for record in records) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".config"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    for name, value, meaning in (
        ("history", 8192, "number of events of each row"),
        ("batch", 8, "number of rows of a batch"),
        ("candidates", 32, "number of candidates of each row"),
        ("window", 256, "window of a history token, in events"),
        ("prefix", 64, "number of oldest events that stay visible"),
        ("tail", 1024, "number of newest events that a truncation keeps"),
        ("repeats", 10, "number of measured steps of each variant"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"{meaning}; default: {value}")
    parser.add_argument(
        "--split-layer", type=positive, help="number of layers before a truncation; default: half"
    )
    parser.add_argument("--backend", help="attention backend; default: auto on CUDA, else reference")
    parser.add_argument(
        "--variant", action="append", choices=[*VARIANTS], help="may be repeated; default: all"
    )
    parser.add_argument("--record", type=Path, help="file to which the results are written")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
