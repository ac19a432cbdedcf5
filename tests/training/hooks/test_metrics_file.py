"""`metrics.jsonl` has all digits of each number and no line twice."""

import json
import math

from recsys.training.hooks import Diagnosed, Evaluated, Run, Trained
from recsys.training.hooks.metrics_file import NAME, MetricsFile, read_metrics
from recsys.training.throughput import Rates
from tests.training.hooks.diagnostic_results import RESULTS


def record(step: int, loss: float = 0.5) -> Trained:
    return Trained(step, 0, loss, {"a": loss}, {"dense": 0.1}, 1.0, Rates(1, 2, 3, 0.25), 9.0)


def write(folder, first_step: int, *records) -> None:
    hook = MetricsFile()
    hook.started(Run(folder, "", first_step, 10))
    for record in records:
        (hook.trained if isinstance(record, Trained) else hook.evaluated)(record)
    hook.close()


def test_numbers_keep_all_their_digits(tmp_path):
    write(tmp_path, 0, record(1, 0.1 + 0.2))
    (line,) = (tmp_path / NAME).read_text().splitlines()
    assert json.loads(line)["loss"] == 0.30000000000000004


def test_speed_and_memory(tmp_path):
    rates = Rates(1, 2, 3, 0.25, flop_per_s=123_456_789.0, mfu=0.512345)
    write(
        tmp_path, 0, Trained(1, 0, 0.5, {"a": 0.5}, {"dense": 0.1}, 1.0, rates, 9.0, memory=2**30), record(2)
    )
    first, second = read_metrics(tmp_path / NAME)
    assert (first["tflop_per_s"], first["mfu"], first["memory_bytes"]) == (0.0001235, 0.5123, 1_073_741_824)
    assert second["mfu"] is None


def test_undefined_metrics_are_null(tmp_path):
    write(tmp_path, 0, Evaluated(1, {"auc": math.nan, "mae": 2.0}, False, 0.1))
    assert read_metrics(tmp_path / NAME)[0]["metrics"] == {"auc": None, "mae": 2.0}
    assert "NaN" not in (tmp_path / NAME).read_text()


def test_a_closer_look_is_a_line_that_programs_can_read(tmp_path):
    hook = MetricsFile()
    hook.started(Run(tmp_path, "", 0, 10))
    hook.diagnosed(Diagnosed(8, RESULTS))
    hook.close()
    assert read_metrics(tmp_path / NAME) == [
        {
            "kind": "diagnostics",
            "step": 8,
            "slices": [
                {
                    "history": [0, 0],
                    "rows": 0,
                    "candidates": 0,
                    "metrics": {"click/auc": None, "seconds/mae": None},
                },
                {
                    "history": [1, 10],
                    "rows": 1,
                    "candidates": 2,
                    "metrics": {"click/auc": None, "seconds/mae": 1.25},
                },
                {
                    "history": [11, 5000],
                    "rows": 1500,
                    "candidates": 4000,
                    "metrics": {"click/auc": 0.75, "seconds/mae": 2.5},
                },
            ],
            "calibration": {
                "click": [
                    {"candidates": 400, "predicted": 0.1, "observed": 0.2},
                    {"candidates": 1200, "predicted": 0.5, "observed": 0.4},
                    {"candidates": 300, "predicted": 0.8, "observed": 1.0},
                ]
            },
        }
    ]


def test_a_run_that_goes_on_repeats_no_line_and_drops_a_torn_one(tmp_path):
    write(tmp_path, 0, *(record(step) for step in range(1, 6)))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"kind": "train", "ste')
    write(tmp_path, 3, record(4, 0.25))
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / NAME)] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
        (4, 0.25),
    ]
