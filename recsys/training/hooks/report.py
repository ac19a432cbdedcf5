"""Writes `report.html` into the run folder: the whole run on one page, without scripts or network access.

The page is made at the end from `metrics.jsonl`, so it shows all steps of a run that was continued. The
hook's events add what the file lacks: the facts of this start and how it spent its time.
"""

import os
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from recsys import environment, files
from recsys.training.hooks.base import Diagnosed, Evaluated, Hook, Outcome, Run, Trained
from recsys.training.hooks.metrics_file import NAME as METRICS
from recsys.training.hooks.metrics_file import read_metrics
from recsys.training.hooks.report_charts import Curve, Point, line_chart, number, sparkline
from recsys.training.hooks.report_diagnostics import diagnostics_sections, split_name
from recsys.training.hooks.report_page import (
    Share,
    Tile,
    card,
    clock,
    facts_table,
    grid,
    page,
    section,
    share_bar,
    tiles,
)
from recsys.training.hooks.report_tested import tested_section

NAME = "report.html"

Record = dict[str, Any]
"""A line of `metrics.jsonl`."""

Metrics = Mapping[str, float]
"""Values by name of the metric."""


class Report(Hook):
    """Writes the page when the run ends, for whatever reason."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._spent = TimeSpent()
        self._start: dict[str, str] = {}

    def started(self, run: Run) -> None:
        """Starts the clock."""
        self._run, self._spent, self._start = run, TimeSpent(), start_facts()

    def stepped(self, step: int) -> None:
        """Counts the time since the last call as a step."""
        self._spent.steps += self._spent.lap()

    def trained(self, record: Trained) -> None:
        """Splits the time of the last steps into computing and waiting for data."""
        self._spent.divide(record.rates.data_wait)

    def evaluated(self, record: Evaluated) -> None:
        """Counts the time since the last call as evaluation."""
        self._spent.evaluation += self._spent.lap()

    def diagnosed(self, record: Diagnosed) -> None:
        """Counts the time since the last call as evaluation."""
        self._spent.evaluation += self._spent.lap()

    def saved(self, path: Path) -> None:
        """Counts the time since the last call as saving."""
        self._spent.saving += self._spent.lap()

    def finished(self, outcome: Outcome) -> None:
        """Writes the page."""
        self._write(outcome)

    def close(self) -> None:
        """Writes the page of a run that an error ended, up to its last record."""
        self._write(None)

    def _write(self, outcome: Outcome | None) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        path = run.folder / METRICS
        records = read_metrics(path) if path.exists() else []
        files.write_text(run.folder / NAME, build(run, records, outcome, self._spent.shares(), self._start))


def start_facts() -> dict[str, str]:
    """Returns when and how this process was started: date, command and, in a clone, the commit."""
    executable, *arguments = sys.orig_argv
    commit = environment.commit()
    return {
        "started": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join([Path(executable).name, *arguments]),
        **({"commit": commit} if commit else {}),
    }


@dataclass
class TimeSpent:
    """Measures the seconds since this start, by activity.

    Attributes:
        steps: seconds in steps whose share of waiting is not known yet.
        computing: seconds of steps without waiting for the reader.
        waiting: seconds of steps spent waiting for the reader.
    """

    steps: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0

    def __post_init__(self) -> None:
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        before, self._mark = self._mark, time.perf_counter()
        return self._mark - before

    def divide(self, waited: float) -> None:
        """Splits the time of the last steps; the share `waited`, 0 to 1, was waiting."""
        self.waiting += self.steps * waited
        self.computing += self.steps * (1 - waited)
        self.steps = 0.0

    def shares(self) -> list[Share]:
        """Returns the time of each activity."""
        return [
            Share("computing steps", self.computing + self.steps),
            Share("waiting for data", self.waiting),
            Share("evaluation", self.evaluation),
            Share("saving", self.saving),
        ]


def build(
    run: Run,
    records: Sequence[Record],
    outcome: Outcome | None,
    shares: Sequence[Share],
    start: Mapping[str, str],
) -> str:
    """Returns the page as HTML.

    Args:
        run: facts and config.
        records: all records of `metrics.jsonl`.
        outcome: how the run ended; None after an error.
        shares: time of this start by activity.
        start: date, command and commit of this start.
    """
    logged = Logged(
        train=[record for record in records if record["kind"] == "train"],
        evaluations=[record for record in records if record["kind"] == "evaluation"],
        last_step=outcome.step if outcome else max([r["step"] for r in records], default=run.first_step),
        decides=outcome.best.metric if outcome and outcome.best else "",
    )
    parts = [_header(run, logged, outcome, shares)]
    if logged.train or logged.evaluations:
        parts.append(section("Loss", grid(_loss_charts(logged))))
    else:
        parts.append(section("Loss", '<p class="empty">The run ended before anything was logged.</p>'))
    parts.append(tested_section(run.folder))
    if logged.evaluations:
        parts += _metric_sections(logged, run.baselines)
    parts += diagnostics_sections(records, logged.best_step)
    if logged.train:
        parts += _optimizer_sections(logged)
    since = f"Since the last start, at step {run.first_step:,}." if run.first_step else ""
    parts.append(section("Where the time went", card(share_bar(shares)), since))
    machine = {**start, **run.facts, "processor": f"{os.cpu_count()} cores", "platform": platform.platform()}
    tables = card(facts_table(machine)) + card(facts_table(environment.versions()))
    parts.append(section("Environment", f'<div class="two">{tables}</div>'))
    config = card(f'<pre tabindex="0">{escape(run.config_text)}</pre>')
    parts.append(
        section("Config", config, "The resolved config: every field that applies, defaults included.")
    )
    return page(f"{run.folder.name} – training report", parts)


@dataclass(frozen=True)
class Logged:
    """The contents of `metrics.jsonl`.

    Attributes:
        train, evaluations: the records of each kind.
        last_step: where the step axis of all charts ends.
        decides: name of the metric that decides which evaluation is best; "" if there is none.
    """

    train: Sequence[Record]
    evaluations: Sequence[Record]
    last_step: int
    decides: str

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None before the first."""
        return max((record["step"] for record in self.evaluations if record["best"]), default=None)

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks with a loss."""
        return list(dict.fromkeys(name for record in self.train for name in record["losses"]))

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics. The loss of a single task is left out, since it equals the total."""
        names = dict.fromkeys(name for record in self.evaluations for name in record["metrics"])
        losses = [name for name in names if name.startswith("loss/")]
        return [name for name in names if len(losses) > 1 or name not in losses]

    def chart(self, title: str, curves: Sequence[Curve], include: float | None = None) -> str:
        """Draws a chart over the steps of the run; curves without points are left out."""
        existing = [curve for curve in curves if curve.points]
        best = self.best_step if any(curve.marks for curve in existing) else None
        return line_chart(title, existing, last_step=self.last_step, best_step=best, include=include)


def _header(run: Run, logged: Logged, outcome: Outcome | None, shares: Sequence[Share]) -> str:
    reason = outcome.reason if outcome else "an error occurred"
    told = f"Stopped after step {logged.last_step:,} of {run.total_steps:,}: {reason}."
    if run.first_step:
        told += f" Continued from step {run.first_step:,}."
    facts = []
    if outcome and outcome.best:
        best = outcome.best
        facts.append(Tile(f"best {best.metric}", number(best.value), f"after step {best.step:,}"))
    if logged.train:
        last = logged.train[-1]
        speed = median(record["samples_per_s"] for record in logged.train)
        wait = median(record["data_wait"] for record in logged.train)
        facts.append(Tile("training loss", number(last["loss"]), f"up to step {last['step']:,}"))
        facts.append(Tile("speed", f"{speed:,.0f}", "samples/s, median"))
        facts.append(Tile("data wait", f"{100 * wait:.0f} %", "of each step, median"))
    facts.append(Tile("time", clock(sum(share.seconds for share in shares)), "since the last start"))
    return f"<header><h1>{escape(run.folder.name)}</h1><p>{escape(told)}</p></header>" + tiles(facts)


def _loss_charts(logged: Logged) -> list[str]:
    """Draws the total loss and, if there are several tasks, the loss of each."""

    def chart(title: str, train: Sequence[Point], validation: Sequence[Point]) -> str:
        return logged.chart(title, [Curve("training", train), Curve("validation", validation, marks=True)])

    train, evaluations, tasks = logged.train, logged.evaluations, logged.tasks
    charts = [chart("loss", _points(train, "loss"), _points(evaluations, "metrics", "loss"))]
    for task in tasks if len(tasks) > 1 else []:
        validation = _points(evaluations, "metrics", f"loss/{task}")
        charts.append(chart(task, _points(train, "losses", task), validation))
    return charts


def _metric_sections(logged: Logged, baselines: Mapping[str, Metrics]) -> list[str]:
    """Returns a table of metrics, and a chart for each kind of metric with one curve per task or k."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in logged.metrics:
        metric = split_name(name)[1]
        if metric != "loss":
            kinds[metric.partition("@")[0]].append(name)
    charts = []
    for kind, names in kinds.items():
        curves = [
            Curve(split_name(name)[0] or name, _points(logged.evaluations, "metrics", name), marks=True)
            for name in names
        ]
        title = split_name(names[0])[1] if len(names) == 1 else kind
        charts.append(logged.chart(title, curves, include=1.0 if kind == "calibration" else None))
    table = section("Validation metrics", card(_metric_table(logged, baselines)))
    return [table, section("Validation metrics over steps", grid(charts))] if charts else [table]


def _metric_table(logged: Logged, baselines: Mapping[str, Metrics]) -> str:
    """Returns a table of metrics by task: best and last evaluation, baselines, and a curve over the steps."""
    evaluations, best = logged.evaluations, logged.best_step
    last = evaluations[-1]
    columns = {f"best, step {r['step']:,}": r["metrics"] for r in evaluations if r["step"] == best}
    if last["step"] != best:
        columns[f"last, step {last['step']:,}"] = last["metrics"]
    columns |= baselines
    heads = "".join(f'<th class="n">{head}</th>' for head in columns)
    rows = [f"<thead><tr><th>task</th><th>metric</th>{heads}<th>over steps</th></tr></thead>"]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in logged.metrics:
        groups[split_name(name)[0]].append(name)
    for task, names in groups.items():
        first = f'<th class="group" rowspan="{len(names)}">{escape(task or "all")}</th>'
        rows.append("<tbody>")
        for name in names:
            mark = '<span class="decides">selects the best state</span>' if name == logged.decides else ""
            cells = "".join(f'<td class="n">{number(metrics.get(name))}</td>' for metrics in columns.values())
            trend = sparkline(_points(evaluations, "metrics", name))
            rows.append(
                f"<tr>{first}<td>{escape(split_name(name)[1])}{mark}</td>{cells}<td>{trend}</td></tr>"
            )
            first = ""
        rows.append("</tbody>")
    return f'<table class="metrics">{"".join(rows)}</table>'


_SPEED = {
    "samples per second": ("samples_per_s", 1.0),
    "tokens per second": ("tokens_per_s", 1.0),
    "waiting for data, % of a step": ("data_wait", 100.0),
    "useful GFLOP per second": ("tflop_per_s", 1e3),
    "useful FLOP, % of the device's peak": ("mfu", 100.0),
    "peak memory so far, GiB": ("memory_bytes", 2.0**-30),
}
"""Charts of speed by title: the key in a record, and the factor that converts to the title's unit."""


def _optimizer_sections(logged: Logged) -> list[str]:
    train = logged.train

    def chart(title: str, points: Sequence[Point]) -> str:
        return logged.chart(title, [Curve(title, points)], include=0.0)

    rates = dict.fromkeys(name for record in train for name in record["lr"])
    optimizers = [chart(f"learning rate, {name}", _points(train, "lr", name)) for name in rates]
    optimizers.append(chart("gradient norm, before clipping", _points(train, "grad_norm")))
    speed = []
    for title, (key, factor) in _SPEED.items():
        measured = [Point(step, value * factor) for step, value in _points(train, key) if value is not None]
        if measured:
            speed.append(chart(title, measured))
    return [section("Optimizers", grid(optimizers)), section("Speed", grid(speed))]


def _points(records: Sequence[Record], *keys: str) -> list[Point]:
    """Returns the value under the nested `keys` of each record that has it."""
    points = []
    for record in records:
        value: Any = record
        for key in keys:
            value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            points.append(Point(record["step"], value))
    return points


_ABSENT = object()
