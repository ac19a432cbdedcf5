"""Shows a run on the console: a progress bar on a terminal, else a line every `log_every_steps` steps.

At the end it shows the next commands to type. All lines go through the log, so `log.txt` has them too, even
those for which the console shows the bar instead. With the time in front, a line fits 100 columns.
"""

import logging
import math
import shlex
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from recsys.logs import FILE_ONLY
from recsys.training.evaluator import LOSS
from recsys.training.hooks.base import Evaluated, Hook, Outcome, Run, Trained

WIDTH = 85
"""Maximum width of a line in columns, not counting the log's time and level."""

log = logging.getLogger(__name__)


class Console(Hook):
    """Reports the progress of a run."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._bar: Bar | None = None
        self._began = 0.0
        self._needs_head = True

    def started(self, run: Run) -> None:
        """Shows facts about the run, and on a terminal the bar."""
        self._run, self._began = run, time.perf_counter()
        for topic, fact in run.facts.items():
            log.info("%s: %s", topic, fact)
        if sys.stderr.isatty():
            self._bar = Bar(run, RichConsole(stderr=True))

    def stepped(self, step: int) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.move(step)

    def trained(self, record: Trained) -> None:
        """Shows the record's `columns` under the bar, or else as a row of a table.

        The head of the table is printed before the first row and again after each evaluation.
        """
        if self._run is None:
            raise ValueError("Console.started has not been called")
        if self._bar is not None:
            self._bar.show(record)
        extra = None if self._bar is None else FILE_ONLY
        head, row = lines(columns(record, self._run.total_steps))
        if self._needs_head:
            log.info("%s", head, extra=extra)
            self._needs_head = False
        log.info("%s", row, extra=extra)

    def evaluated(self, record: Evaluated) -> None:
        """Shows all metrics, one row per task."""
        if self._bar is not None:
            self._bar.evaluated(record)
        best = ", the best so far" if record.best else ""
        log.info("evaluation after step %d, %.1f s%s", record.step, record.seconds, best)
        baselines = {} if self._run is None else self._run.baselines
        for line in compared_table(record.metrics, baselines) if baselines else metric_table(record.metrics):
            log.info("  %s", line)
        self._needs_head = True

    def finished(self, outcome: Outcome) -> None:
        """Shows the results, their files, and the next commands."""
        if self._run is None:
            raise ValueError("Console.started has not been called")
        self.close()
        seconds = time.perf_counter() - self._began
        log.info("stopped after step %d, %.0f s: %s", outcome.step, seconds, outcome.reason)
        for line in next_lines(outcome, self._run):
            log.info("%s", line)

    def close(self) -> None:
        """Removes the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Lines(NamedTuple):
    """The head and a row of a table, as text."""

    head: str
    row: str


class Bar:
    """Shows progress, speed, losses and the last metrics in the last lines of a terminal, below the log."""

    def __init__(self, run: Run, console: RichConsole):
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left")
        )
        self._task = self._progress.add_task("", total=run.total_steps, completed=run.first_step)
        self._total_steps = run.total_steps
        self._speed: list[str] = []
        self._metrics: list[str] = []
        self._live = Live(self._progress, console=console, transient=True, refresh_per_second=4)
        self._live.start()

    def move(self, step: int) -> None:
        """Moves the bar to a finished step."""
        self._progress.update(self._task, completed=step)

    def show(self, record: Trained) -> None:
        """Shows the newest record."""
        shown = columns(record, self._total_steps)
        parts = {head: f"{head} {text}" for head, text in shown.items() if head not in ("step", "left")}
        # Two lines, so that everything fits 80 columns.
        second = [parts.pop(head) for head in ("data wait", "memory")]
        self._speed = ["  ".join(parts.values()), "  ".join(second)]
        if len(record.losses) > 1:
            self._speed.append(f"losses: {_named(record.losses)}")
        self._refresh()

    def evaluated(self, record: Evaluated) -> None:
        """Shows the newest evaluation without its losses, which are in the log."""
        metrics = {name: value for name, value in record.metrics.items() if name.partition("/")[0] != LOSS}
        best = ", the best so far" if record.best else ""
        self._metrics = [f"step {record.step}{best}: {_named(metrics)}"] if metrics else []
        self._refresh()

    def _refresh(self) -> None:
        below = (Text(text) for text in (*self._speed, *self._metrics))
        self._live.update(Group(self._progress, *below), refresh=True)

    def stop(self) -> None:
        """Removes the lines."""
        self._live.stop()


def columns(record: Trained, total_steps: int) -> dict[str, str]:
    """Returns a record as text by column. MFU is included only if the device's peak is known."""
    rates = record.rates
    mfu = {} if rates.mfu is None else {"MFU": f"{100 * rates.mfu:.0f} %"}
    width = len(str(total_steps))
    return {
        "step": f"{record.step:>{width}}/{total_steps}",
        "loss": _number(record.loss),
        "samples/s": f"{rates.samples_per_s:,.0f}",
        "tokens/s": f"{rates.tokens_per_s:,.0f}",
        "FLOP/s": _with_prefix(rates.flop_per_s),
        **mfu,
        "data wait": f"{100 * rates.data_wait:.0f} %",
        "memory": _bytes(record.memory),
        "left": _clock(record.seconds_left),
    }


def lines(shown: Mapping[str, str]) -> Lines:
    """Formats `columns` as head and row, wide enough for all numbers, so that rows line up."""
    sizes = {name: max(len(name), len(text), _SIZES.get(name, 0)) for name, text in shown.items()}
    return Lines(
        head="  ".join(f"{name:>{size}}" for name, size in sizes.items()),
        row="  ".join(f"{shown[name]:>{size}}" for name, size in sizes.items()),
    )


def metric_table(metrics: Mapping[str, float]) -> list[str]:
    """Formats metrics as lines: one row per task and one column per metric, transposed if that is too wide.

    A task's loss is listed with its metrics. Metrics that belong to no single task are in the row "all".
    """
    tasks: dict[str, dict[str, str]] = {}
    for name, value in metrics.items():
        task, _, metric = name.rpartition("/")
        if task == LOSS:
            task, metric = metric, LOSS
        tasks.setdefault(task, {})[metric] = _number(value)
    shared_metrics = tasks.pop("", {})
    if not tasks:
        return _table([list(shared_metrics), list(shared_metrics.values())])
    tasks["all"] = shared_metrics
    kinds = list(dict.fromkeys(metric for metrics in tasks.values() for metric in metrics))
    rows = [[task, *(metrics.get(kind, "") for kind in kinds)] for task, metrics in tasks.items()]
    table = _table([["", *kinds], *rows])
    if max(map(len, table)) > WIDTH - 2:
        table = _table([list(column) for column in zip(["", *kinds], *rows, strict=True)])
    return table


def compared_table(metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Formats metrics as lines: one row for the model and one per baseline, "-" where a value is missing."""
    rows = {"model": metrics, **baselines}
    cells = [
        [name, *(_number(row.get(metric, math.nan)) for metric in metrics)] for name, row in rows.items()
    ]
    table = [["", *metrics], *cells]
    lines = _table(table)
    return (
        lines
        if max(map(len, lines)) <= WIDTH - 2
        else _table([list(column) for column in zip(*table, strict=True)])
    )


def next_lines(outcome: Outcome, run: Run) -> list[str]:
    """Returns the last lines that a run shows: best evaluation, checkpoint, files, commands."""
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
        return [*lines, "to resume, start the same command again"]
    lines.append("next:")
    if run.splits:
        split = "" if "test" in run.splits else f" --split {run.splits[0]}"
        lines.append(f"  python -m recsys.evaluate --run-dir {folder}{split}")
    rows = "" if "test" in run.splits else " --input FILES"
    return [
        *lines,
        f"  python -m recsys.export --run-dir {folder}",
        f"  python -m recsys.predict --run-dir {folder}{rows}",
    ]


_SIZES = {"loss": 8, "FLOP/s": 7, "MFU": 5, "memory": 8, "left": 7}
"""Widths, in characters, of columns whose numbers are wider than their names."""


def _table(rows: list[list[str]]) -> list[str]:
    """Aligns the first column left if its head is empty, and all other columns right."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{size}}" for cell, size in zip(row, sizes, strict=True)]
        if not rows[0][0]:
            cells[0] = f"{row[0]:<{sizes[0]}}"
        lines.append("  ".join(cells).rstrip())
    return lines


def _named(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in values.items())


def _number(value: float) -> str:
    """Formats a value with four decimals, or six significant digits from 1000 on; "-" if it is undefined."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.6g}"


def _with_prefix(value: float) -> str:
    """Formats a value with three significant digits and an SI prefix: 3.21 G, 512 T."""
    prefixes = ("", "K", "M", "G", "T", "P")
    power = min(int(math.log10(max(value, 1)) // 3), len(prefixes) - 1)
    return f"{value / 1000**power:.3g} {prefixes[power]}".rstrip()


def _bytes(count: int) -> str:
    mebi = count / 2**20
    return f"{mebi:.0f} MiB" if mebi < 1000 else f"{mebi / 1024:.1f} GiB"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
