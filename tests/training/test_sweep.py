"""Sweeps: the grid, its results and their order; and the suggestion of the learning-rate test."""

import json
import math
from pathlib import Path

import pytest

from recsys import config
from recsys import sweep as command
from recsys.errors import ConfigError
from recsys.training import rate_test, sweep
from recsys.training.hooks import Outcome
from recsys.training.state import Best

CONFIG = Path("tests/integration/tiny.config")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.seed=[1,2, 3]", ["1", "2", "3"]),
        (
            "model.x=[{a {b: 1, c: [1,2]}},{d {}}]",
            ["{a {b: 1, c: [1,2]}}", "{d {}}"],
        ),
    ],
)
def test_values_are_parsed(text, values):
    assert sweep.parse_setting(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text", ["train.seed", "train.seed=1", "train.seed=[1,]", "train.seed=[1,1]", "=[1]"]
)
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="--vary"):
        sweep.parse_setting(text)


def test_the_grid_has_every_combination_and_is_checked_before_a_run():
    settings = [
        sweep.Setting("train.dense_optimizer.adamw.lr", ["1e-3", "2e-3"]),
        sweep.Setting("train.sparse_optimizer.row_wise_adagrad.lr", ["0.05"]),
        sweep.Setting("train.seed", ["1", "2"]),
    ]
    points = sweep.combine(CONFIG, ["train.num_steps=4"], settings)
    made = [
        (point.ready.pipeline.train.dense_optimizer.adamw.lr, point.ready.pipeline.train.seed)
        for point in points
    ]
    assert made == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    assert all(point.ready.pipeline.train.num_steps == 4 for point in points)
    assert len({point.name for point in points}) == 4
    assert all("/" not in point.name for point in points)
    with pytest.raises(ConfigError, match="train.seed: -1 is given"):
        sweep.combine(CONFIG, [], [sweep.Setting("train.seed", ["1", "-1"])])
    with pytest.raises(ConfigError, match="given twice"):
        sweep.combine(CONFIG, [], [sweep.Setting("train.seed", ["1"]), sweep.Setting("train.seed", ["2"])])


@pytest.mark.parametrize(("metric", "order"), [("is_click/auc", [2, 1, 3]), ("watch_time/mae", [1, 2, 3])])
def test_results_are_ordered_by_the_metric(tmp_path, metric, order):
    """Each run's value is its seed, but the third has none."""
    points = sweep.combine(CONFIG, [], [sweep.Setting("train.seed", ["1", "2", "3"])])

    def train(point, folder):
        seed = point.ready.pipeline.train.seed
        return Outcome(8, "done", folder, None if seed == 3 else Best(metric, float(seed), 4))

    # The third run has the metric of its config.
    points = [
        point._replace(
            ready=config.prepare(CONFIG, [f"train.evaluation.best_metric={metric}", f"train.seed={i}"])
        )
        for i, point in enumerate(points, 1)
    ]
    results = sweep.sweep(points, tmp_path, train)
    best_first = sweep.ordered(results, points[0].ready.pipeline)
    assert [int(result.values["train.seed"]) for result in best_first] == order
    assert [run["best"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == [
        1.0,
        2.0,
        None,
    ]
    page = (tmp_path / "report.html").read_text()
    assert "3 of 3 runs are finished" in page and f"{points[0].name}/report.html" in page
    assert sweep.table(best_first)[0].split()[:3] == ["train.seed", "best", metric]


def test_a_sweep_ends_with_the_run_that_a_signal_ended(tmp_path):
    points = sweep.combine(CONFIG, [], [sweep.Setting("train.seed", ["1", "2"])])
    assert sweep.sweep(points, tmp_path, lambda point, folder: Outcome(1, "", folder, signal=15)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_trained_again(tmp_path, capsys):
    arguments = ["--config", str(CONFIG), "--run-dir", str(tmp_path), "--set", "train.num_steps=2"]
    arguments += ["--vary", "train.seed=[1,2]"]
    assert command.main(arguments) == 0
    shown = capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(files) == 2
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == shown
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_the_rate_with_the_steepest_fall_is_suggested():
    rates = [10 ** (-5 + place / 10) for place in range(51)]
    # A logistic fall centred at 10^-3, then growth.
    losses = [5 - 3 / (1 + math.exp(-(place - 20) / 2)) + max(0, place - 35) for place in range(51)]
    assert rate_test.suggest(rates, losses) == pytest.approx(1e-3, rel=0.3)
    with pytest.raises(ConfigError, match="fell at no rate"):
        rate_test.suggest(rates, [float(place) for place in range(51)])
