"""Writes a trace of some steps, which chrome://tracing and ui.perfetto.dev show."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recsys.training.hooks.base import Hook, Run

NAME = "profile.json.gz"
BEFORE = 5
"""Number of steps at the start of a run that are not recorded, because they compile and allocate."""

log = logging.getLogger(__name__)


class Profile(Hook):
    """Records what the CPU and the GPU of the first process do in `steps` consecutive steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._profiler: profile | None = None
        self._path = Path(NAME)

    def started(self, run: Run) -> None:
        """Starts to count steps."""
        self._path = run.folder / NAME
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        plan = schedule(wait=BEFORE - 1, warmup=1, active=self._steps, repeat=1)
        self._profiler = profile(
            activities=kinds, schedule=plan, on_trace_ready=self._write, record_shapes=True
        )
        self._profiler.start()

    def stepped(self, step: int) -> None:
        """Counts a step, and writes the trace after the last one."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Writes the trace of a run that ended before enough steps were recorded."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if profiler.step_num <= BEFORE:
            log.warning("--profile: the run ended before step %d, so there is no trace", BEFORE + 1)

    def _write(self, profiler: profile) -> None:
        if profiler.step_num <= BEFORE:
            return
        profiler.export_chrome_trace(str(self._path))
        log.info("profile: %s, open it in https://ui.perfetto.dev", self._path)
