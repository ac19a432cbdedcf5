"""A table of variants and seeds: real runs, their figures, failures that leave the others alone."""

import json

import pytest

from scripts import run_table
from scripts.run_table import Follower, Outcome, main, runs_of, summary

TINY = "tests/integration/tiny.config"


def written(folder, **table):
    path = folder / "table.json"
    path.write_text(json.dumps({"columns": ["is_click/auc"], "split": "validation", **table}))
    return str(path)


def test_a_table_of_real_runs(tmp_path, capsys):
    """A run, its timing run, and a variant that cannot be trained."""
    table = written(
        tmp_path,
        set=["train.num_steps=4", "train.checkpoint.every_steps=4"],
        variants=[{"name": "plain", "config": TINY}, {"name": "broken", "config": TINY, "set": ["data.x=1"]}],
    )
    record = tmp_path / "record.json"
    flags = [
        "--runs",
        str(tmp_path / "runs"),
        "--seeds",
        "2",
        "--timing-steps",
        "12",
        "--record",
        str(record),
    ]
    assert main([table, *flags]) == 1
    output = capsys.readouterr().out
    assert "broken-2: recsys.train ended with exit code 2" in output
    outcomes = [Outcome(**one) for one in json.loads(record.read_text())]
    timed, run = (one for one in outcomes if one.variant == "plain")
    assert timed.seed is None and timed.ms > 0 and timed.memory_mb > 0 and not timed.metrics
    assert run.seed == 2 and 0 < run.metrics["is_click/auc"] < 1
    last = run.curve[-1]
    assert last["step"] == 4 and 0 < run.first_seconds <= last["seconds"] <= run.seconds
    assert f"| plain | 1 | {run.metrics['is_click/auc']:.4f} | {run.seconds:.0f} | {timed.ms:.1f} |" in output
    assert "| broken | 0 |  |  |  |  |" in output


def test_the_last_evaluation_of_training(tmp_path):
    """Without a split nothing more is run: the figures are those that training ended with."""
    table = written(tmp_path, split="", set=["train.num_steps=2"], variants=[{"name": "a", "config": TINY}])
    record = tmp_path / "record.json"
    assert main([table, "--runs", str(tmp_path / "runs"), "--seeds", "1", "--record", str(record)]) == 0
    (run,) = (Outcome(**one) for one in json.loads(record.read_text()))
    assert run.metrics["is_click/auc"] == run.curve[-1]["is_click/auc"]
    assert not (tmp_path / "runs/a-1/validation_metrics.json").exists()


def test_mean_and_spread():
    outcomes = [Outcome("a", seed, metrics={"x": value}) for seed, value in ((1, 0.1), (2, 0.3), (3, None))]
    assert "| a | 3 | 0.2000 ± 0.1414 |  |  |  |" in summary(outcomes, ["x"])


def test_seconds_to_a_goal():
    """Each run counts from when it first had all of the goal; one that never had is left out."""
    rising = [{"step": 1, "seconds": 3.0, "x": 0.1}, {"step": 2, "seconds": 9.0, "x": 0.3}]
    undefined = [{"step": 1, "seconds": 1.0, "x": None}, {"step": 2, "seconds": 5.0, "x": 0.2}]
    outcomes = [Outcome("a", n, curve=curve, seconds=20) for n, curve in enumerate([rising, undefined, []])]
    assert outcomes[0].seconds_to({"x": 0.2}) == 9 and outcomes[2].seconds_to({"x": 0.2}) is None
    table = summary(outcomes, [], {"x": 0.2})
    assert "seconds to x 0.2" in table and "| a | 3 | 20 ± 0 | 7 ± 3 |" in table


def test_a_file_is_followed_while_it_grows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    follower.look()
    path.write_text('{"kind": "train", "step": 4}\n{"kind": "evalu')
    follower.look()
    assert follower.first is not None and not follower.evaluations
    path.write_text(
        '{"kind": "train", "step": 4}\n{"kind": "evaluation", "step": 4, "metrics": {"x": 0.5}}\n'
    )
    follower.look()
    follower.look()
    (point,) = follower.curve(["x", "y"])
    assert point.pop("seconds") >= 0 and point == {"step": 4, "x": 0.5, "y": None}


def test_the_first_third_is_not_timed(tmp_path):
    rates = [1, 1, 100, 100, 50, 100]
    lines = [{"kind": "train", "samples_per_s": rate, "memory_bytes": rate * 1e6} for rate in rates]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"kind": "evaluation"}])))
    assert run_table.speed_of(tmp_path, rows=20) == (200.0, 100.0)


def test_wrong_tables(tmp_path, capsys):
    table = written(tmp_path, variants=[{"name": "a", "config": TINY}])
    assert main([table, "--runs", str(tmp_path), "--variant", "b"]) == 2
    assert "no variant is named b; there are a" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), "--runs", str(tmp_path)]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main([written(tmp_path, variants=[{"name": "a"}]), "--runs", str(tmp_path)]) == 2
    assert "'config' is missing" in capsys.readouterr().err
    with pytest.raises(ValueError, match="twice"):
        runs_of({"variants": [{"name": "a", "config": TINY}] * 2}, [1], [], 0)
