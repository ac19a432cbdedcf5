"""Times the training steps of a config, as `recsys train` takes them, on a GPU.

    python steps.py CONFIG [--steps 300] [--set PATH=VALUE ...]

Prints the milliseconds between the ends of steps on the host, over the last 100 steps, and the number of
recorded sizes.
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
LAST = 100


class Stamps(trainer.Hook):
    """The time at which the host finished each step."""

    def __init__(self):
        self.seconds = []

    def stepped(self, step):
        self.seconds.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[])
    flags = parser.parse_args()
    overrides = [*flags.set, *FOR_TIMING, f"train.num_steps={flags.steps}"]
    pipeline = config.prepare(flags.config, overrides).pipeline
    with process_group() as processes, tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        session.validation = None
        recorder, stamps = session.step.recorder, Stamps()
        trainer.Trainer(session, [stamps]).run()
        torch.cuda.synchronize()
        last = stamps.seconds[-LAST:]
        graphs = 0 if recorder is None else recorder.num_graphs
        print(f"{1e3 * (last[-1] - last[0]) / (len(last) - 1):.2f} ms a step, {graphs} sizes recorded")
        del session


if __name__ == "__main__":
    main()
