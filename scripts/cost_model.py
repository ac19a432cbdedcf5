#!/usr/bin/env python3
"""Estimates the memory, the traffic and the time of a training step on many GPUs from a config.

    python scripts/cost_model.py --config FILE [--set PATH=VALUE ...] [--gpus 8 64 1000] [--tflops 450 ...]

Prints the bytes of the sharded tables by optimizer and number type; then, for each number of GPUs, the bytes
of a GPU, the bytes that it sends in a step, and the time of the step:

    step = compute + 2 all-to-alls of embeddings + the all-reduce behind the backward pass + unexplained

`compute` is the FLOP of a GPU's rows, as the model counts them, over `--tflops`, the rate of whole steps on
one GPU, lookups and optimizers included. The two all-to-alls carry the embeddings of a GPU's ids and their
gradients in float32; ids travel during the step before. All tables are taken to be divided by rows over all
GPUs. An all-to-all takes the longer one of its parts inside and between hosts, and `--message-us` for each
peer. The all-reduce of dense gradients runs during the backward pass, 2/3 of the compute, and only its rest
counts. `--unexplained-ms` is what steps of several GPUs were measured to take beyond that.

The default constants come from experiments/2026-11-28-scale, which says which are measured and which are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.config import features, fields
from recsys.data.loader import Loader
from recsys.flags import Parser, positive
from recsys.models import build_model, layout_rule
from recsys.prepare.command import run
from recsys.training.memory import dense_memory
from recsys.training.optimizers import chosen_sparse

_NUMBER = {pb.FP32: 4, pb.FP16: 2}
"""Bytes of a number."""

BACKWARD = 2 / 3
"""Share of the backward pass in the FLOP of a step."""


@dataclass(frozen=True)
class Work:
    """The work of one GPU in a step, whatever the number of GPUs.

    Attributes:
        tokens: tokens of its sequences.
        flop: FLOP of forward and backward pass.
        id_bytes: bytes of its ids as int64, each as often as it is sent.
        embedding_bytes: bytes of their embeddings in float32, which are those of their gradients too.
        gradient_bytes: bytes of the gradients of all weights that are not sharded.
        dense_bytes: bytes of these weights, their gradients and optimizer states.
    """

    tokens: float
    flop: float
    id_bytes: float
    embedding_bytes: float
    gradient_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Cluster:
    """The constants of the model; see `_options` for their units."""

    tflops: float
    gpus_per_host: int
    link_gb_per_s: float
    network_gb_per_s: float
    latency_us: float
    message_us: float
    unexplained_ms: float
    straggler: float


@dataclass(frozen=True)
class StepTime:
    """Parts of a step in seconds."""

    compute: float
    all_to_all: float
    all_reduce: float
    unexplained: float

    @property
    def total(self) -> float:
        """The time of the step."""
        return (
            self.compute
            + self.all_to_all
            + max(0.0, self.all_reduce - BACKWARD * self.compute)
            + self.unexplained
        )


def step_time(work: Work, cluster: Cluster, gpus: int) -> StepTime:
    """Returns the parts of a step on `gpus` GPUs."""
    return StepTime(
        compute=cluster.straggler * work.flop / (1e12 * cluster.tflops),
        all_to_all=2 * all_to_all(work.embedding_bytes, cluster, gpus),
        all_reduce=all_reduce(work.gradient_bytes, cluster, gpus),
        unexplained=1e-3 * cluster.unexplained_ms if gpus > 1 else 0.0,
    )


def all_to_all(size: float, cluster: Cluster, gpus: int) -> float:
    """Returns the seconds in which each GPU divides `size` bytes equally among all GPUs."""
    if gpus == 1:
        return 0.0
    inside = min(gpus, cluster.gpus_per_host)
    in_host = size * (inside - 1) / gpus / (1e9 * cluster.link_gb_per_s)
    outside = size * (gpus - inside) / gpus / (1e9 * cluster.network_gb_per_s)
    return max(in_host, outside) + 1e-6 * (cluster.latency_us + (gpus - 1) * cluster.message_us)


def all_reduce(size: float, cluster: Cluster, gpus: int) -> float:
    """Returns the seconds in which `size` bytes are summed over all GPUs.

    NCCL's rings pass through all GPUs of a host and leave it by all of its network cards.
    """
    if gpus == 1:
        return 0.0
    rate = cluster.link_gb_per_s
    if gpus > cluster.gpus_per_host:
        rate = min(rate, cluster.gpus_per_host * cluster.network_gb_per_s)
    return 2 * (gpus - 1) / gpus * size / (1e9 * rate) + 1e-6 * cluster.latency_us


def table_bytes(pipeline: pb.Pipeline, optimizer: str, precision: int | None = None) -> float:
    """Returns the bytes of all sharded tables with the optimizer's states, over all GPUs.

    Args:
        pipeline: the resolved config.
        optimizer: a field of pb.SparseOptimizer.
        precision: pb.FP32 or pb.FP16; None takes the precision of each table in the config.
    """
    message = pb.SparseOptimizer()
    getattr(message, optimizer).SetInParent()
    chosen = chosen_sparse(message)
    return sum(
        table.rows
        * (table.width * _NUMBER[precision or table.precision] + 4 * chosen.numbers_per_row(table.width))
        for table in features.tables(pipeline)
        if table.sharded
    )


def work_of(pipeline: pb.Pipeline, batches: int, unique: float) -> Work:
    """Returns the work of the first batches of the config's training rows, on average.

    Args:
        pipeline: the resolved config.
        batches: number of batches to read.
        unique: share of the ids that is sent, 1 unless `train.unique_ids` is set.
    """
    model = build_model(pipeline, whole=False)
    tables = [table for table in features.tables(pipeline) if table.sharded]
    width = {column: table.width for table in tables for column in table.columns}
    read = list(islice(Loader.open(pipeline, "train", layout_rule(pipeline)).epoch(), batches))
    ids = {column: sum(len(batch.ids[column].values()) for batch in read) / len(read) for column in width}
    sharded = sum(table.rows * table.width for table in tables)
    numbers = sum(parameter.numel() for parameter in model.parameters()) - sharded
    return Work(
        tokens=sum(batch.sequences.total_len for batch in read) / len(read),
        flop=3 * sum(model.flops(batch) for batch in read) / len(read),
        id_bytes=8 * unique * sum(ids.values()),
        embedding_bytes=4 * unique * sum(count * width[column] for column, count in ids.items()),
        gradient_bytes=4 * numbers,
        dense_bytes=dense_memory(model, pipeline),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the estimate; see the head of this file."""
    options = _options(arguments)
    environment.import_torchrec_quietly()
    pipeline = config.prepare(options.config, [*options.overrides, "data.num_workers=0"]).pipeline
    cluster = Cluster(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Cluster)})
    work = work_of(pipeline, options.batches, options.unique)
    parts = (
        _sizes(pipeline),
        _memory(pipeline, work, options),
        _traffic(pipeline, work),
        _steps(work, cluster, options.gpus),
        _failures(options),
    )
    print("\n\n".join("\n".join(part) for part in parts))


def _sizes(pipeline: pb.Pipeline) -> Iterator[str]:
    rows = sum(table.rows for table in features.tables(pipeline) if table.sharded)
    yield f"sharded tables with optimizer states, {rows:,} rows, GB over all GPUs:"
    lines = [("optimizer", "FP32", "FP16")]
    for field in fields.alternatives(pb.SparseOptimizer):
        sizes = [table_bytes(pipeline, field.name, precision) / 1e9 for precision in _NUMBER]
        lines.append((field.name, *(f"{size:,.2f}" for size in sizes)))
    yield from _aligned(lines)


def _memory(pipeline: pb.Pipeline, work: Work, options: argparse.Namespace) -> Iterator[str]:
    chosen = fields.chosen(pipeline.train.sparse_optimizer)
    tables = table_bytes(pipeline, chosen.name) if chosen is not None else 0.0
    activations = options.activation_bytes * work.tokens
    yield "memory of a GPU, GB" + ("" if activations else ", without activations (--activation-bytes)") + ":"
    lines = [("GPUs", "tables", "other weights", "activations", "sum")]
    for gpus in options.gpus:
        sizes = [tables / gpus, work.dense_bytes, activations]
        lines.append((f"{gpus:,}", *(f"{size / 1e9:,.2f}" for size in [*sizes, sum(sizes)])))
    yield from _aligned(lines)


def _traffic(pipeline: pb.Pipeline, work: Work) -> Iterator[str]:
    yield (
        f"a step of a GPU: {pipeline.data.batch_size:,} rows, {work.tokens:,.0f} tokens, "
        f"{work.flop / 1e12:,.2f} TFLOP; it sends"
    )
    yield (
        f"{work.id_bytes / 1e6:,.2f} MB of ids, {work.embedding_bytes / 1e6:,.1f} MB of embeddings and as "
        f"many of their gradients, {work.gradient_bytes / 1e6:,.1f} MB of other gradients"
    )


def _steps(work: Work, cluster: Cluster, counts: Sequence[int]) -> Iterator[str]:
    yield "time of a step, ms:"
    lines = [("GPUs", "compute", "all-to-all", "all-reduce", "unexplained", "step", "tokens/s", "of linear")]
    alone = work.flop / (1e12 * cluster.tflops)
    for gpus in counts:
        time = step_time(work, cluster, gpus)
        parts = [time.compute, time.all_to_all, time.all_reduce, time.unexplained, time.total]
        speed = (f"{gpus * work.tokens / time.total:,.0f}", f"{alone / time.total:.1%}")
        lines.append((f"{gpus:,}", *(f"{1e3 * part:,.1f}" for part in parts), *speed))
    yield from _aligned(lines)


def _failures(options: argparse.Namespace) -> Iterator[str]:
    """Formats the time lost with checkpoints every sqrt(2 x stall x MTBF), the best interval (Young)."""
    yield f"failures, one in {options.hours_between_failures:,.0f} hours of a GPU:"
    lines = [("GPUs", "hours between two", "minutes between checkpoints", "time lost")]
    for gpus in options.gpus:
        between = 3600 * options.hours_between_failures / gpus
        interval = math.sqrt(2 * options.stall_s * between)
        lost = 2 * options.stall_s / interval + options.restart_s / between
        lines.append((f"{gpus:,}", f"{between / 3600:,.1f}", f"{interval / 60:,.0f}", f"{lost:.2%}"))
    yield from _aligned(lines)


def _aligned(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--gpus", type=positive, nargs="+", default=[1, 8, 64, 1000])
    parser.add_argument("--gpus-per-host", type=positive, default=8)
    parser.add_argument("--batches", type=positive, default=1, help="batches that are read; default: 1")
    for name, value, meaning in (
        ("tflops", 481.0, "useful TFLOP/s of a GPU in a step"),
        ("link-gb-per-s", 306.0, "GB/s that a GPU sends to others of its host"),
        ("network-gb-per-s", 50.0, "GB/s that a GPU sends to other hosts"),
        ("latency-us", 45.0, "microseconds of a collective of few bytes"),
        ("message-us", 10.0, "microseconds of each peer in an all-to-all"),
        ("unexplained-ms", 6.5, "milliseconds of a step on several GPUs that nothing else explains"),
        ("straggler", 1.0, "work of the busiest GPU over the mean"),
        ("unique", 1.0, "share of the ids that is sent; below 1 with train.unique_ids"),
        ("activation-bytes", 0.0, "bytes of activations a token"),
        ("hours-between-failures", 50_000.0, "hours of one GPU between two failures"),
        ("stall-s", 2.0, "seconds that training stands still for a checkpoint"),
        ("restart-s", 120.0, "seconds from a failure to the next step"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{meaning}; default: {value:g}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(main))
