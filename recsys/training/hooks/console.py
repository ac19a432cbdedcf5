"""The run on the console: a progress bar on a terminal, else a line every `log_every_steps` steps; then what
to type.

Lines go through the log, so `log.txt` has them as well.
"""

import logging
import shlex
import sys
import time
from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recsys.training.evaluator import LOSS
from recsys.training.hooks.base import Evaluated, Hook, Outcome, Run, Trained

log = logging.getLogger(__name__)


class Console(Hook):
    """Says where the run is."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._bar: Progress | None = None
        self._began = 0.0

    def started(self, run: Run) -> None:
        """Facts about the run."""
        self._run, self._began = run, time.perf_counter()
        for topic, fact in run.facts.items():
            log.info("%s: %s", topic, fact)
        if sys.stderr.isatty():
            self._bar = _progress_bar()
            self._bar.add_task("", total=run.total_steps, completed=run.first_step, status="")
            self._bar.start()

    def stepped(self, step: int) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def trained(self, record: Trained) -> None:
        """One line: step, share, losses, learning rate, speed, data wait, time left."""
        if self._run is None:
            raise ValueError("Console.started has not been called")
        line = describe(record, self._run.total_steps)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], status=_short(record))
            log.debug("%s", line)
        else:
            log.info("%s", line)

    def evaluated(self, record: Evaluated) -> None:
        """All metrics, a line a task."""
        best = ", the best so far" if record.best else ""
        log.info("evaluation after step %d, %.1f s%s", record.step, record.seconds, best)
        for line in by_task(record.metrics):
            log.info("  %s", line)

    def finished(self, outcome: Outcome) -> None:
        """What came out, where it is, and what to type next."""
        if self._run is None:
            raise ValueError("Console.started has not been called")
        self.close()
        seconds = time.perf_counter() - self._began
        log.info("stopped after step %d, %.0f s: %s", outcome.step, seconds, outcome.reason)
        for line in next_lines(outcome, self._run):
            log.info("%s", line)

    def close(self) -> None:
        """Takes the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(record: Trained, total_steps: int) -> str:
    """A record as one line."""
    rates = record.rates
    losses = record.losses if len(record.losses) > 1 else {}
    parts = [
        f"step {record.step}/{total_steps} ({100 * record.step // total_steps} %)",
        f"loss {record.loss:.4f}" + "".join(f"  {name} {value:.4f}" for name, value in losses.items()),
        "lr " + "/".join(f"{rate:.2e}" for rate in record.lr.values()),
        f"{rates.samples_per_s:,.0f} samples/s",
        f"{rates.tokens_per_s:,.0f} tokens/s",
        f"data wait {100 * rates.data_wait:.0f} %",
        f"{_clock(record.seconds_left)} left",
    ]
    return "  ".join(parts)


def by_task(metrics: Mapping[str, float]) -> list[str]:
    """Metrics as lines: those of no task, then those of each; a task's loss stands with its metrics."""
    lines: dict[str, list[str]] = {"": []}
    for name, value in metrics.items():
        task, _, metric = name.rpartition("/")
        if task == LOSS:
            task, metric = metric, LOSS
        lines.setdefault(task, []).append(f"{metric} {value:.4f}")
    return [(f"{task}: " if task else "") + "  ".join(shown) for task, shown in lines.items() if shown]


def next_lines(outcome: Outcome, run: Run) -> list[str]:
    """The last lines of a run: best evaluation, checkpoint, files, commands."""
    lines = []
    if outcome.best is not None:
        best = outcome.best
        lines.append(f"best: {best.metric} {best.value:.4f} after step {best.step}")
    lines.append(f"checkpoint: {outcome.checkpoint}")
    lines.append(f"metrics: {run.folder / 'metrics.jsonl'}")
    lines.append(f"TensorBoard: tensorboard --logdir {shlex.quote(str(run.folder / 'tensorboard'))}")
    lines.append(f"report: {run.folder / 'report.html'}")
    folder = shlex.quote(str(run.folder))
    if outcome.signal:
        return [*lines, "to go on, start the same command again"]
    return [
        *lines,
        "next:",
        f"  python -m recsys.evaluate --run-dir {folder}",
        f"  python -m recsys.export --run-dir {folder}",
        f"  python -m recsys.predict --run-dir {folder}",
    ]


def _progress_bar() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=RichConsole(stderr=True),
        transient=True,
    )


def _short(record: Trained) -> str:
    rates = record.rates
    speed = f"{rates.samples_per_s:,.0f} samples/s  data wait {100 * rates.data_wait:.0f} %"
    return f"loss {record.loss:.4f}  {speed}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
