"""A table of variants and seeds: real runs, their figures, failures that leave the others alone."""

import json

import pytest

from scripts import run_table
from scripts.run_table import Outcome, main, runs_of, summary

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
    assert f"| plain | 1 | {run.metrics['is_click/auc']:.4f} | {timed.ms:.1f} |" in output
    assert "| broken | 0 |  |  |  |" in output


def test_mean_and_spread():
    outcomes = [Outcome("a", seed, metrics={"x": value}) for seed, value in ((1, 0.1), (2, 0.3), (3, None))]
    assert "| a | 3 | 0.2000 ± 0.1414 |  |  |" in summary(outcomes, ["x"])


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
