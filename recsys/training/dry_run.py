"""Trains one step on one batch for `--dry-run` and shows what a run would do. Nothing is kept."""

import tempfile
from contextlib import closing
from pathlib import Path

import recsys.config as config
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.inspect import as_table, describe_sample
from recsys.models.check_kernels import check_kernels, describe_kernels
from recsys.training import averaging
from recsys.training.averaging import WeightAverage
from recsys.training.checkpoint import local_bytes
from recsys.training.distributed import Processes
from recsys.training.drawing import draw_stages
from recsys.training.session import Session, open_session
from recsys.training.throughput import peak_memory

_MEBI = 2**20


def dry_run(pipeline: pb.Pipeline, processes: Processes) -> None:
    """Builds everything, trains on one batch, and prints a sample, sizes and kernels. Collective.

    Raises:
        ConfigError: the config asks for something that the device cannot do.
    """
    config.check_device(pipeline, processes.device.type)
    check_kernels(pipeline, processes.device.type)
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        with closing(session.batches()) as batches:
            batch = next(batches)
        loss = _step(session, batch)
        if processes.is_main:
            print(f"the longest of the first {len(batch.uih_lengths)} rows:")
            row = int(batch.layout.lengths.argmax())
            print(as_table(describe_sample(batch, row, pipeline)))
            if session.model.mixer is not None:
                print("\nits tokens through the layers: position now and at first, kind, and what it sees")
                print(draw_stages(session.model.mixer, batch, row))
            kernels = describe_kernels(pipeline, processes.device.type)
            print("\n".join(["", *_sizes(session, batch), *kernels, f"loss of the first step: {loss:.4f}"]))


def _step(session: Session, batch: Batch) -> float:
    session.optimizer.zero_grad()
    loss, pending = session.wrapped(batch.to(session.processes.device))
    result = pending.wait()
    loss.backward()
    session.optimizer.step()
    return result.loss


def _sizes(session: Session, batch: Batch) -> list[str]:
    layout, steps, parts = batch.sequences, session.total_steps, session.parameters
    states = local_bytes(session.optimizer.tensors())
    weights = local_bytes(session.wrapped.state_dict())
    averages = [] if session.average is None else [_average(session, session.average)]
    return [
        f"batch: {len(batch.uih_lengths)} rows, {layout.total_len:,} tokens, "
        f"at most {layout.max_len} per sequence",
        f"run: {steps:,} steps, {session.train.num_batches():,} batches per epoch",
        f"parameters: {sum(parts.values()):,}: "
        + ", ".join(f"{name} {n:,}" for name, n in parts.items() if n),
        f"this process: {weights / _MEBI:.1f} MiB of weights, {states / _MEBI:.1f} MiB of optimizer state",
        *averages,
        f"memory: {peak_memory(session.processes.device) / _MEBI:,.0f} MiB at peak so far",
    ]


def _average(session: Session, average: WeightAverage) -> str:
    kept = local_bytes(average.tensors(session.progress.step))
    method = averaging.describe(session.pipeline.train.weight_averaging)
    return f"averaged weights: {method}; {kept / _MEBI:.1f} MiB more in this process, and as much on disk"
