"""A trace holds the steps that were asked for, and a run too short for it says so."""

import gzip
import json

from recsys import train as train_command
from tests.integration.runs import flags

STILL = (
    "train.schedule.warmup_steps=0",
    "train.evaluation.every_steps=20",
    "train.checkpoint.every_steps=20",
)


def test_a_trace_has_the_steps_that_were_asked_for(tmp_path):
    assert train_command.main([*flags(tmp_path, "train.num_steps=10", *STILL), "--profile", "3"]) == 0
    events = json.loads(gzip.open(tmp_path / "profile.json.gz").read())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {name for name in names if "ProfilerStep" in str(name)} == {f"ProfilerStep#{n}" for n in (5, 6, 7)}
    assert {"aten::addmm", "Optimizer.step#AdamW.step"} <= names


def test_a_run_that_ends_before_the_first_step_has_no_trace(tmp_path, caplog, capsys):
    assert train_command.main([*flags(tmp_path, "train.num_steps=5", *STILL), "--profile", "3"]) == 0
    assert "--profile: the run ended before step 6, so there is no trace" in caplog.text
    assert not (tmp_path / "profile.json.gz").exists()
    assert train_command.main([*flags(tmp_path), "--dry-run", "--profile", "3"]) == 2
    assert "--profile: --dry-run trains one step only" in capsys.readouterr().err
