"""Times the evaluations of a config during training, as `recsys train` makes them, beside its training.

    python evaluation.py CONFIG [--eager] [--steps 40] [--every N] [--pause 2] [--set PATH=VALUE ...]

After some training steps, the validation split is evaluated five times: the first compiles kernels, in it and in the
second sizes are recorded, the next two are timed, and the last runs under torch's profiler. A pause of some seconds
before each stands for training, in which readers prepare the next evaluation. Prints milliseconds of an evaluation:
by the clock, computing time of the main thread, waiting for its reader, and kernels; the milliseconds of the first two
by the clock; the number of recorded sizes; and the metrics, which those with `--eager`, that is without graphs, should
equal. What recording could save at most is the computing time. With `--calls`, also the calls of one evaluation that took
longest, by cProfile. With
`--every`, the number of steps between two evaluations, also the part of training that this is.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from recsys import config
from recsys.training import trainer
from recsys.training.distributed import process_group
from recsys.training.evaluator import evaluate
from recsys.training.session import open_session

FOR_TIMING = ["train.log_every_steps=100000", "train.checkpoint.every_steps=100000"]
TIMED = 2
EAGER = SimpleNamespace(failed=True)
"""Stands in for a recorder whose recording has failed."""


class Waiting:
    """A loader that counts the time in which its batches are waited for, and their number."""

    def __init__(self, loader):
        self._loader, self.seconds, self.batches = loader, 0.0, 0

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def first(self, limit):
        batches = iter(self._loader.first(limit))
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            self.batches += 1
            yield batch


class Stamps(trainer.Hook):
    def __init__(self):
        self.stamps = []

    def stepped(self, step):
        self.stamps.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int)
    parser.add_argument("--pause", type=float, default=2.0)
    parser.add_argument("--set", action="append", default=[])
    flags = parser.parse_args()
    pipeline = config.prepare(flags.config, [*flags.set, *FOR_TIMING, f"train.num_steps={flags.steps}"]).pipeline
    pipeline.train.evaluation.every_steps = 100_000
    cuda = torch.cuda.is_available()
    with process_group() as processes, tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        loader, session.validation = Waiting(session.validation), None
        stamps = Stamps()
        trainer.Trainer(session, [stamps]).run()

        recorder = EAGER if flags.eager else session.evaluation_recorder

        def once():
            began = time.perf_counter()
            metrics = evaluate(session.model, loader, session.processes.device, recorder=recorder)
            if cuda:
                torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - began), metrics

        first, metrics = once()
        time.sleep(flags.pause)
        second, _ = once()
        loader.seconds, loader.batches, clock, computing = 0.0, 0, 0.0, 0.0
        for _ in range(TIMED):
            time.sleep(flags.pause)
            began, thread = time.perf_counter(), time.thread_time()
            once()
            clock, computing = clock + time.perf_counter() - began, computing + time.thread_time() - thread
        waiting, batches = loader.seconds, loader.batches // TIMED
        kernels = kernel_seconds(once) if cuda else float("nan")
        if flags.calls:
            profiler = cProfile.Profile()
            profiler.runcall(once)
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
        clock, computing, waiting = (1e3 * seconds / TIMED for seconds in (clock, computing, waiting))
        print(
            f"{flags.config} {' '.join(flags.set)}: {clock:.0f} ms an evaluation of {batches} batches, {computing:.0f} computing, "
            f"{waiting:.0f} waiting for the reader, {1e3 * kernels:.0f} of kernels; {first:.0f} and {second:.0f} ms the first two, "
            f"{getattr(recorder, 'num_graphs', 0)} sizes recorded"
        )
        print({name: round(value, 6) for name, value in metrics.items()})
        if flags.every:
            step = (stamps.stamps[-1] - stamps.stamps[-11]) / 10 * 1e3
            part = clock / (clock + flags.every * step)
            print(f"{step:.2f} ms a step, so that with one in {flags.every} steps evaluation takes {part:.1%} of the time")
        del session


def kernel_seconds(run):
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    return sum(event.self_device_time_total for event in kernels) / 1e6


if __name__ == "__main__":
    main()
