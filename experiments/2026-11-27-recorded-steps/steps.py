"""Times training steps with and without CUDA graphs, and compares the weights.

    python steps.py CONFIG [--steps 250] [--set PATH=VALUE ...]

Trains the same run three times: recorded; with padded batches, unrecorded; and without padding. Prints for each
the milliseconds per step, from the last 50 steps, and whether the first two end with the same bits.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from recsys import config
from recsys.training import trainer
from recsys.training.distributed import process_group
from recsys.training.session import open_session

FOR_TIMING = [
    "train.log_every_steps=100000",
    "train.evaluation.every_steps=100000",
    "train.checkpoint.every_steps=100000",
    "train.schedule.warmup_steps=0",
]


class Stamps(trainer.Hook):
    """The time at which the host finished each step."""

    def __init__(self):
        self.seconds = []

    def stepped(self, step):
        self.seconds.append(time.perf_counter())


def train(path, overrides, way):
    pipeline = config.prepare(path, [*overrides, *FOR_TIMING]).pipeline
    with process_group() as processes, tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        session.validation = None
        losses, stamps = session.step, Stamps()
        recorder = losses.recorder
        if way == "padded":
            recorder.record = False
        elif way == "plain":
            losses.recorder = None
        trainer.Trainer(session, [stamps]).run()
        torch.cuda.synchronize()
        last = stamps.seconds[-50:]
        graphs = recorder.num_graphs if way == "recorded" else 0
        print(
            f"{way}: {1e3 * (last[-1] - last[0]) / (len(last) - 1):.1f} ms a step, {graphs} graphs",
            flush=True,
        )
        weights = [parameter.detach().clone() for parameter in session.model.parameters()]
        del session
    return weights


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--set", action="append", default=[])
    flags = parser.parse_args()
    overrides = [*flags.set, f"train.num_steps={flags.steps}"]
    recorded, padded, _ = (train(flags.config, overrides, way) for way in ("recorded", "padded", "plain"))
    print("same bits:", all(map(torch.equal, recorded, padded)))


if __name__ == "__main__":
    main()
