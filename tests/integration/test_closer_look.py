"""Diagnostics of the last and the best evaluation of a real run agree with the metrics of training."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recsys.training.evaluator import BestMetric
from recsys.training.hooks.metrics_file import NAME, read_metrics
from tests.integration.runs import records, train

SHORT = ("train.num_steps=8", "train.schedule.warmup_steps=2", "train.evaluation.every_steps=2")


def first_is_best(_goal, _value, best):
    return best is None


def assert_agrees(evaluation, diagnostics):
    """Means over the slices are those over all rows; bins have all candidates."""
    total = sum(entry["candidates"] for entry in diagnostics["slices"])
    error = sum(
        entry["candidates"] * entry["metrics"]["watch_time/mae"]
        for entry in diagnostics["slices"]
        if entry["candidates"]
    )
    assert error / total == pytest.approx(evaluation["metrics"]["watch_time/mae"], rel=1e-9)
    (bins,) = diagnostics["calibration"].values()
    assert sum(entry["candidates"] for entry in bins) == total


def images(folder) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    return {tag: [event.step for event in events.Tensors(tag)] for tag in events.PluginTagToContent("images")}


def test_the_last_state_and_then_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(BestMetric, "reached", first_is_best)
    assert train(tmp_path, *SHORT) == 0
    lines = [line for line in read_metrics(tmp_path / NAME) if line["kind"] == "diagnostics"]
    assert [line["step"] for line in lines] == [8, 2]
    evaluations = records(tmp_path, "evaluation")
    for line in lines:
        assert [entry["history"] for entry in line["slices"]] == [[0, 0], [1, 10], [11, 20]]
        assert_agrees(evaluations[line["step"]], line)
    assert lines[0]["slices"] != lines[1]["slices"]
    pictures = images(tmp_path)
    assert len(pictures) == 4
    assert all(tag.startswith("attention, layer 1/user_id ") for tag in pictures)
    assert all(sorted(steps) == [2, 8] for steps in pictures.values())
    html = (tmp_path / "report.html").read_text()
    assert "the best state, step 2" in html and "The same for the last state, step 8" in html


def test_a_last_state_that_is_the_best_is_looked_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(BestMetric, "reached", lambda *_: True)
    assert train(tmp_path, *SHORT) == 0
    assert [line["step"] for line in read_metrics(tmp_path / NAME) if line["kind"] == "diagnostics"] == [8]


def test_the_end_of_patience_is_a_last_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(BestMetric, "reached", first_is_best)
    assert train(tmp_path, *SHORT, "train.evaluation.patience=2") == 0
    assert sorted(records(tmp_path, "evaluation")) == [2, 4, 6]
    assert sorted(records(tmp_path, "diagnostics")) == [2, 6]


def test_a_best_state_that_is_gone_is_named_and_the_run_ends_well(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(BestMetric, "reached", first_is_best)
    monkeypatch.setattr("recsys.training.checkpoint.Checkpoints._prune", prune_best)
    assert train(tmp_path, *SHORT) == 0
    assert sorted(records(tmp_path, "diagnostics")) == [8]
    assert "the best state cannot be loaded" in caplog.text
    assert "the last state, step 8" in (tmp_path / "report.html").read_text()


def prune_best(checkpoints, best):
    """Deletes the best checkpoint, as a user who tidies up might do."""
    for path in checkpoints.steps()[:-1]:
        if path.name == f"step-{best.step:08d}":
            path.rename(path.with_name("taken-away"))
