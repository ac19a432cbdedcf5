"""Runs a small sweep: trains every combination of some settings in turn and compares validation metrics.

Each combination is an ordinary run in a separate folder, so a stopped sweep continues where it was: finished
runs are not trained again, and an unfinished run continues.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import NamedTuple

from recsys import config, files
from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks import metric_names
from recsys.config.declarations import model_of
from recsys.config.registry import pick
from recsys.errors import ConfigError
from recsys.training.hooks import Outcome
from recsys.training.hooks.report_charts import number
from recsys.training.hooks.report_page import card, page, section

MOST_RUNS = 100
RESULTS, REPORT = "sweep.json", "report.html"


class Setting(NamedTuple):
    """A field to vary: its path, and its values as text."""

    path: str
    values: list[str]


class Point(NamedTuple):
    """A combination: the name of its folder, its values by path, and the resulting config."""

    name: str
    values: dict[str, str]
    ready: config.Ready


class Result(NamedTuple):
    """The result of a run: the best value of its metric and that value's step.

    Without an evaluation the value is None and the step is the run's last.
    """

    name: str
    values: dict[str, str]
    metric: str
    best: float | None
    step: int


def parse_setting(text: str) -> Setting:
    """Parses `path=[value,value]`. Values may be messages in braces, whose commas do not separate values.

    Raises:
        ConfigError: the text has another form, or a value is empty or repeated.
    """
    path, mark, given = text.partition("=")
    given = given.strip()
    if not (path.strip() and mark and given.startswith("[") and given.endswith("]")):
        raise ConfigError(
            f"--vary {text}: not PATH=[VALUE,VALUE,...], for example "
            "'train.dense_optimizer.adamw.lr=[1e-3,2e-3]'"
        )
    values, depth = [""], 0
    for character in given[1:-1]:
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    values = [value.strip() for value in values]
    if "" in values or len(set(values)) < len(values):
        raise ConfigError(f"--vary {text}: a value is empty or repeated")
    return Setting(path.strip(), values)


def combine(file: Path, overrides: Sequence[str], settings: Sequence[Setting]) -> list[Point]:
    """Returns all combinations of the settings, checked before any of them is trained.

    Args:
        file: the config.
        overrides: overrides as for `config.prepare`; a combination's values are applied after them.
        settings: the settings to vary.

    Raises:
        ConfigError: a path is given twice, there are too many combinations, or some are not valid configs.
    """
    paths = [setting.path for setting in settings]
    if len(set(paths)) < len(paths):
        raise ConfigError("--vary: a path is given twice; list all of its values in one")
    grid = list(product(*(setting.values for setting in settings)))
    if len(grid) > MOST_RUNS:
        raise ConfigError(
            f"--vary: {len(grid)} runs; a sweep trains at most {MOST_RUNS}, so give fewer values"
        )
    last = [path.rpartition(".")[2] for path in paths]
    labels = [path if last.count(name) > 1 else name for path, name in zip(paths, last, strict=True)]
    points, findings = [], []
    for number_of_run, values in enumerate(grid, 1):
        changed = [f"{path}={value}" for path, value in zip(paths, values, strict=True)]
        try:
            ready = config.prepare(file, [*overrides, *changed])
        except ConfigError as error:
            findings += error.findings
            continue
        pairs = zip(labels, values, strict=True)
        told = ",".join(f"{label}={_file_name(value)}" for label, value in pairs)
        points.append(
            Point(f"{number_of_run:02d}-{told}"[:100], dict(zip(paths, values, strict=True)), ready)
        )
    if findings:
        raise ConfigError(list(dict.fromkeys(findings)))
    return points


def sweep(points: Sequence[Point], folder: Path, train: Callable[[Point, Path], Outcome]) -> list[Result]:
    """Trains the combinations one after another; writes RESULTS and REPORT after each.

    Args:
        points: the result of `combine`.
        folder: folder of the sweep; each run has a folder in it.
        train: trains a combination in a folder, or returns at once if that run is finished.

    Returns:
        Results in the order of training; if a signal ends a run, the results before that run.
    """
    results: list[Result] = []
    for point in points:
        outcome = train(point, folder / point.name)
        if outcome.signal:
            break
        best = outcome.best
        metric = best.metric if best else point.ready.pipeline.train.evaluation.best_metric
        value, step = (best.value, best.step) if best else (None, outcome.step)
        results.append(Result(point.name, point.values, metric, value, step))
        _write(folder, results, len(points))
    return results


def ordered(results: Sequence[Result], pipeline: pb.Pipeline) -> list[Result]:
    """Sorts results of one metric from best to worst; results without a value come last.

    Args:
        results: the result of `sweep`.
        pipeline: resolved config of any of the runs, which tells whether higher values of the metric are
            better.
    """
    listed = (metric for metrics in model_of(pipeline).metrics() for metric in metrics.metrics)
    classes = [pick(metric).cls for metric in listed if fields.chosen(metric) is not None]
    names = [name.name for name in metric_names(pipeline)]
    rising = {name for name, cls in zip(names, classes, strict=True) if cls.higher_is_better}
    sign = -1 if results and results[0].metric in rising else 1
    return sorted(results, key=lambda result: (result.best is None, sign * (result.best or 0.0)))


def table(results: Sequence[Result]) -> list[str]:
    """Formats results as the lines of a table, one per run."""
    if not results:
        return []
    heads = [*results[0].values, f"best {results[0].metric}", "step", "run"]
    rows = [
        [*result.values.values(), number(result.best), str(result.step), result.name] for result in results
    ]
    sizes = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    return [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in [heads, *rows]
    ]


def _write(folder: Path, results: Sequence[Result], num_points: int) -> None:
    record = [result._asdict() for result in results]
    files.write_text(folder / RESULTS, json.dumps({"runs": record, "of": num_points}, indent=1))
    heads = "".join(
        f"<th>{escape(head)}</th>"
        for head in (*results[0].values, f"best {results[0].metric}", "after step", "report")
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(value)}</td>" for value in result.values.values())
        + f'<td class="n">{number(result.best)}</td><td class="n">{result.step:,}</td>'
        + f'<td><a href="{escape(result.name)}/report.html">{escape(result.name)}</a></td></tr>'
        for result in results
    )
    body = card(f'<table class="sweep"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>')
    note = f"{len(results)} of {num_points} runs are finished; metrics of the validation rows."
    files.write_text(folder / REPORT, page(f"{folder.name} – sweep", [section(folder.name, body, note)]))


def commands(best: Result, folder: Path) -> list[str]:
    """Returns the commands to run next: evaluation and export of the best run."""
    run = shlex.quote(str(folder / best.name))
    return [f"python -m recsys.evaluate --run-dir {run}", f"python -m recsys.export --run-dir {run}"]


def _file_name(value: str) -> str:
    """Replaces characters that should not stand in a folder's name by "_"."""
    return "".join(character if character.isalnum() or character in "+-._" else "_" for character in value)
