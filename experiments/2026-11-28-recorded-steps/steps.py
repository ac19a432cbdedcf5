"""Times the training steps of a config, as `recsys train` takes them, on a GPU.

    python steps.py CONFIG [--steps 300] [--profile FILE] [--set PATH=VALUE ...]

Prints the milliseconds between the ends of steps on the host, over the last 100 steps, how many of them the main
thread computed and waited for its reader, and the number of recorded sizes. With `--profile`, 20 further steps
run under torch's profiler, whose tables go to a text file.
"""

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from recsys import config
from recsys.training import trainer
from recsys.training.distributed import process_group
from recsys.training.session import open_session

FOR_TIMING = [
    "train.log_every_steps=100000",
    "train.checkpoint.every_steps=100000",
    "train.schedule.warmup_steps=0",
]
LAST, PROFILED = 100, 20


class Done(Exception):
    """Ends the training without the save at its end, which large tables have no room for."""


class Stamps(trainer.Hook):
    """The time at which the host finished each step, its computing time, and its waiting time so far."""

    def __init__(self, meter, steps, profiler):
        self._meter, self._steps, self._profiler = meter, steps, profiler
        self.stamps = []

    def stepped(self, step):
        self.stamps.append((time.perf_counter(), time.thread_time(), self._meter._waited))
        if self._profiler is not None and step == self._steps:
            torch.cuda.synchronize()
            self._profiler.start()
        if step == self._steps + (PROFILED if self._profiler is not None else 0):
            raise Done


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--set", action="append", default=[])
    flags = parser.parse_args()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) if flags.profile else None
    steps = flags.steps + (PROFILED if flags.profile else 0)
    pipeline = config.prepare(flags.config, [*flags.set, *FOR_TIMING, f"train.num_steps={steps + 1}"]).pipeline
    pipeline.train.evaluation.every_steps = 100_000
    with process_group() as processes, tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        session.validation = None
        recorder = session.step.recorder
        runner = trainer.Trainer(session, hooks := [])
        hooks.append(Stamps(runner._meter, flags.steps, profiler))
        with suppress(Done):
            runner.run()
        torch.cuda.synchronize()
        if profiler is not None:
            profiler.stop()
            write(profiler, flags.profile)
        last = hooks[0].stamps[flags.steps - LAST - 1 : flags.steps]
        step, host, reader = (1e3 * (b - a) / LAST for a, b in zip(last[0], last[-1], strict=True))
        graphs = 0 if recorder is None else recorder.num_graphs
        print(
            f"{flags.config} {' '.join(flags.set)}: {step:.2f} ms a step, {host:.2f} computing on the host, "
            f"{reader:.2f} waiting for the reader; {graphs} sizes recorded, {torch.cuda.get_device_name()}"
        )
        del session, runner, recorder


def write(profiler, path):
    averages = profiler.key_averages()
    # Operators have the time of their kernels once more.
    kernels = [event for event in averages if event.device_type == DeviceType.CUDA]
    gpu = sum(event.self_device_time_total for event in kernels) / PROFILED / 1e3
    tables = [
        averages.table(sort_by=order, row_limit=45, max_name_column_width=70)
        for order in ("self_cpu_time_total", "self_cuda_time_total")
    ]
    path.write_text("\n".join([f"{gpu:.3f} ms of kernels a step, {PROFILED} steps", *tables]))


if __name__ == "__main__":
    main()
