"""Measures the CPU time of the main thread in recorded training steps, on a machine without a GPU.

    python host.py CONFIG [--steps 600] [--generated] [--set PATH=VALUE ...]

Graphs that do nothing stand in for CUDA graphs, a row of zeros for FBGEMM's lookup, and nothing is copied to a
device. So all of Python's work of a step is left but the launches and FBGEMM's own. Prints medians over the
last two thirds of the steps, in milliseconds: the whole step, and in it the next batch (from the reader's
message to the `HostBatch`), filling the buffers, and the backward pass, which a GPU has in another thread.
With `--generated`, rows are generated and ids hashed, so that no data is needed.
"""

import argparse
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from recsys import config
from recsys.modules.embedding import EmbeddingGroup
from recsys.scoring.static_buffers import StaticBuffers
from recsys.training import session as sessions
from recsys.training import trainer
from recsys.training.cuda_graphs import StepGraph
from recsys.training.distributed import process_group
from recsys.training.padded_inputs import PaddedInputs
from recsys.training.recorded_step import Recorder

FOR_TIMING = [
    "train.log_every_steps=100000",
    "train.checkpoint.every_steps=100000",
    "train.schedule.warmup_steps=0",
]


class IdleGraph(StepGraph):
    """A graph whose replays do nothing."""

    def __init__(self, compute, vectors, parameters, pool):
        totals, idle = compute(), SimpleNamespace(replay=lambda: None)
        self._vectors, self._parameters = list(vectors), list(parameters)
        self._num_vectors = len(vectors)  # the name before `_vectors`
        self._forward = self._backward = self._update = idle
        self._result = replace(totals, losses=totals.losses.detach(), loss=totals.loss.detach())
        self._totals = self._result  # the name before `_result`
        self._grad_loss = torch.ones_like(totals.loss)
        inputs = [*vectors, *parameters]
        self._gradients = torch.autograd.grad(totals.loss, inputs, allow_unused=True)
        self._anchor = torch.zeros((), requires_grad=True)
        self._updated = torch.ones(())


class ZeroRow(torch.autograd.Function):
    """Stands in for FBGEMM's lookup."""

    @staticmethod
    def forward(ctx, anchor, rows):
        return rows

    @staticmethod
    def backward(ctx, grad):
        return None, None


def add_graph(recorder, sizes, inputs):
    def compute():
        return recorder._computed(inputs.rows, inputs)

    recorder._graphs[sizes] = IdleGraph(compute, inputs.rows, recorder._parameters(), None)


def rows(group, ids):
    # A single row, since a GPU copies rows without the host.
    anchor = torch.zeros((), requires_grad=True)
    widths = [next(iter(widths.values())) for widths in group.groups()]
    return [ZeroRow.apply(anchor, torch.zeros(1, width)) for width in widths]


@contextmanager
def filling(buffers, cleared=True):
    host = buffers._host[0]
    buffers._host.append(buffers._host.pop(0))
    if cleared:
        host.memory.zero_()
    yield host.arrays
    if "filled" not in vars(buffers):  # the results of the graph come from the first batch
        buffers.filled = True
        buffers._memory.copy_(host.memory)


def timed(function, times):
    def call(*args, **kwargs):
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(time.thread_time() - began)

    return call


class Stamps(trainer.Hook):
    def __init__(self):
        self.stamps = []

    def stepped(self, step):
        self.stamps.append(time.thread_time())
        time.sleep(0.003)  # so that the reader is ahead, as it is of a GPU


def prepared(flags):
    changes = [*flags.set, *FOR_TIMING, f"train.num_steps={flags.steps}"]
    if not flags.generated:
        pipeline = config.prepare(flags.config, changes).pipeline
        pipeline.train.evaluation.every_steps = 100_000
        return pipeline
    rows = "data.train.synthetic={num_rows: 16384 max_history_len: 200 max_candidates: 10}"
    pipeline = config.load(flags.config, [rows, *changes])
    for field in ("validation", "test", "vocabulary_dir"):
        pipeline.data.ClearField(field)
    pipeline.train.ClearField("evaluation")
    for feature in pipeline.features:
        if feature.id.HasField("vocabulary"):
            feature.id.hash.num_buckets = 10_000
    return config.resolve(pipeline, read_files=False).pipeline


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    flags = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = prepared(flags)
    sessions.recorder_for = lambda model, behind, pipeline, *_: Recorder(model, behind, pipeline)
    Recorder._add_graph, EmbeddingGroup.rows, StaticBuffers.filling = add_graph, rows, filling
    parts = {"next batch": [], "filling": [], "backward": []}
    PaddedInputs.fill = timed(PaddedInputs.fill, parts["filling"])
    torch.Tensor.backward = timed(torch.Tensor.backward, parts["backward"])
    with process_group() as processes, tempfile.TemporaryDirectory() as folder:
        session = sessions.open_session(pipeline, Path(folder), processes)
        session.validation = None
        following = timed(session.batches().__next__, parts["next batch"])
        session.batches = lambda: iter(following, None)
        hook = Stamps()
        trainer.Trainer(session, [hook]).run()
        skipped = flags.steps // 3
        steps = [1e3 * (b - a) for a, b in zip(hook.stamps, hook.stamps[1:], strict=False)]
        listed = ", ".join(f"{name} {1e3 * median(times[skipped:]):.2f}" for name, times in parts.items())
        sizes = session.step.recorder.num_graphs
        print(f"{flags.config}: a step {median(steps[skipped:]):.2f} ms; {listed}; {sizes} sizes", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
