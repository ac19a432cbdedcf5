"""Evaluate says what training said about the same weights; a dry run shows everything and leaves nothing."""

import json
import re

from recsys import cli
from recsys import train as train_command
from tests.integration.runs import evaluate, flags, records, train


def test_evaluate_repeats_what_training_measured(tmp_path, capsys):
    short = ("train.num_steps=4", "train.schedule.warmup_steps=1", "train.evaluation.every_steps=2")
    assert train(tmp_path, *short, "train.evaluation.max_batches=") == 0
    measured = {step: record["metrics"] for step, record in records(tmp_path, "evaluation").items()}
    assert measured[2] != measured[4]
    for step in (2, 4):
        arguments = ("--run-dir", str(tmp_path), "--split", "validation", "--checkpoint", str(step))
        assert evaluate(*arguments) == 0
        written = json.loads((tmp_path / "validation_metrics.json").read_text())
        assert written == {"checkpoint": f"step-{step:08d}", "metrics": measured[step]}
        assert f"{measured[step]['is_click/auc']:.5f}" in capsys.readouterr().out
    best = max(measured, key=lambda step: measured[step]["is_click/auc"])
    assert evaluate("--run-dir", str(tmp_path), "--split", "validation") == 0
    written = json.loads((tmp_path / "validation_metrics.json").read_text())
    assert written == {"checkpoint": f"step-{best:08d}", "metrics": measured[best]}


def test_what_is_not_there_is_named(tmp_path, capsys, caplog):
    assert evaluate(*flags(tmp_path)) == 2
    assert "data.test: absent" in capsys.readouterr().err
    assert evaluate(*flags(tmp_path), "--split", "validation") == 1
    assert "there is no whole checkpoint" in caplog.text


def test_a_dry_run_shows_a_sample_and_sizes_and_leaves_nothing(tmp_path, capsys):
    folder = tmp_path / "run"
    assert cli.main("train", train_command.run, [*flags(folder), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "position  kind        item" in shown
    assert "contextual  hour=" in shown
    assert "sequence: " in shown
    assert "to the head: " in shown
    sizes = shown.split("parameters: ")[1].split("\n")[0]
    total, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", sizes))
    assert len(parts) == 4
    assert sum(parts) == total
    assert "kernel of hstu_attention: reference" in shown
    assert not folder.exists()
