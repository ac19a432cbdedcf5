"""Lines of the console."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from recsys.logs import is_for_console
from recsys.training.hooks import Evaluated, Outcome, Run, Trained
from recsys.training.hooks.console import WIDTH, Bar, Console, columns, lines, metric_table, next_lines
from recsys.training.state import Best
from recsys.training.throughput import Rates

RUN = Run(Path("runs/my run"), "", 0, 200)


Quiet = RichConsole(file=io.StringIO(), force_terminal=True)
LOSSES = {"click": 0.7, "time": 2.0}


def record(rates: Rates, step: int = 50, seconds_left: float = 3725) -> Trained:
    return Trained(step, 0, 1.25, LOSSES, {"dense": 1e-3}, 3.0, rates, seconds_left, memory=850 * 2**20)


def test_a_row_has_what_one_looks_for():
    rates = Rates(2, 1234.5, 98765.4, data_wait=0.07, flop_per_s=3.214e9)
    head, row = lines(columns(record(rates), 200))
    assert head == "   step      loss  samples/s  tokens/s   FLOP/s  data wait    memory     left"
    assert row == " 50/200    1.2500      1,234    98,765   3.21 G        7 %   850 MiB  1:02:05"


def test_on_a_known_device_with_its_share_of_the_peak():
    rates = Rates(2, 61234.5, 9876543.2, data_wait=0.0, flop_per_s=512.3e12, mfu=0.518)
    actual = columns(Trained(7, 0, 1.25, LOSSES, {}, 3.0, rates, 59, memory=80 * 2**30), 100_000)
    assert (actual["FLOP/s"], actual["MFU"], actual["memory"], actual["left"]) == (
        "512 T",
        "52 %",
        "80.0 GiB",
        "0:59",
    )
    assert len(lines(actual).row) == len(lines(actual).head) <= 100


def test_rows_stand_below_each_other_and_need_no_more_than_100_columns():
    slow, fast = Rates(1, 9.0, 120.0, 1.0, 4e6), Rates(1, 1234.5, 123456.0, 0.0, 9.87e11)
    rows = [lines(columns(record(slow, 5, 3725), 1200)), lines(columns(record(fast, 1200, 0), 1200))]
    assert len({len(line) for both in rows for line in both}) == 1
    assert len(rows[0].row) <= WIDTH == 100 - len("08:30:01 INFO ") - 1


@pytest.fixture
def told(caplog):
    """The lines that the hook logs without a terminal."""
    caplog.set_level("INFO", logger="recsys")

    def say(*records) -> list[str]:
        hook = Console()
        hook.started(RUN)
        for record in records:
            (hook.trained if isinstance(record, Trained) else hook.evaluated)(record)
        hook.close()
        return [r.message for r in caplog.records]

    return say


def test_the_head_comes_first_and_after_each_evaluation(told):
    rates = Rates(2, 10.0, 20.0, 0.5)
    evaluated = Evaluated(50, {"auc": 0.5, "loss": 0.25}, True, 2.04)
    head, row = lines(columns(record(rates), 200))
    assert told(record(rates), record(rates), evaluated, record(rates)) == [
        head,
        row,
        row,
        "evaluation after step 50, 2.0 s, the best so far",
        "     auc    loss",
        "  0.5000  0.2500",
        head,
        row,
    ]


def test_on_a_terminal_the_rows_go_to_the_file(monkeypatch, caplog):
    caplog.set_level("INFO", "recsys")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("recsys.training.hooks.console.RichConsole", lambda stderr: Quiet)
    hook = Console()
    hook.started(RUN)
    hook.trained(record(Rates(2, 10.0, 20.0, 0.5)))
    hook.close()
    head, row = caplog.records
    assert row.message.startswith(" 50/200") and row.levelname == "INFO"
    assert not is_for_console(head) and not is_for_console(row)


def test_the_bar_shows_what_the_row_shows_and_the_last_metrics_in_80_columns():
    terminal = RichConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    bar = Bar(RUN, terminal)
    bar.move(50)
    bar.show(record(Rates(2, 1234.5, 98765.4, data_wait=0.07, flop_per_s=3.214e9, mfu=0.42)))
    bar.evaluated(Evaluated(50, {"click/auc": 0.625, "time/mae": math.nan, "loss": 0.5}, True, 2.0))
    shown = terminal.file.getvalue()
    assert " 50/200 " in shown
    lines = [line.strip() for line in shown.splitlines()]
    for expected in (
        "loss 1.2500  samples/s 1,234  tokens/s 98,765  FLOP/s 3.21 G  MFU 42 %",
        "data wait 7 %  memory 850 MiB",
        "losses: click 0.7000  time 2.0000",
        "step 50, the best so far: click/auc 0.6250  time/mae -",
    ):
        assert expected in lines
    bar.stop()
    assert terminal.file.getvalue().endswith("\x1b[2K")  # the last line is erased


def test_the_last_lines_are_commands_that_can_be_typed():
    outcome = Outcome(200, "all 200 steps are done", Path("c/step-00000200"), Best("auc", 0.75, 120))
    assert next_lines(outcome, replace(RUN, splits=("validation", "test"))) == [
        "best: auc 0.7500 after step 120",
        "checkpoint: c/step-00000200",
        "metrics: runs/my run/metrics.jsonl",
        "TensorBoard: tensorboard --logdir 'runs/my run/tensorboard'",
        "report: runs/my run/report.html",
        "next:",
        "  python -m recsys.evaluate --run-dir 'runs/my run'",
        "  python -m recsys.export --run-dir 'runs/my run'",
        "  python -m recsys.predict --run-dir 'runs/my run'",
    ]


EXPORT, FROM_FILES = "export --run-dir R", "predict --run-dir R --input FILES"


@pytest.mark.parametrize(
    ("splits", "commands"),
    [
        (("validation", "test"), ["evaluate --run-dir R", EXPORT, "predict --run-dir R"]),
        (("test",), ["evaluate --run-dir R", EXPORT, "predict --run-dir R"]),
        (("validation",), ["evaluate --run-dir R --split validation", EXPORT, FROM_FILES]),
        ((), [EXPORT, FROM_FILES]),
    ],
)
def test_the_commands_fit_the_rows_that_the_config_names(splits, commands):
    lines = next_lines(Outcome(2, "", Path("c")), replace(RUN, folder=Path("R"), splits=splits))
    assert lines[lines.index("next:") + 1 :] == [f"  python -m recsys.{command}" for command in commands]


def test_after_a_signal_the_next_command_is_the_same_one():
    lines = next_lines(Outcome(7, "signal 15 stopped the run", Path("c"), None, 15), RUN)
    assert lines[-1] == "to resume, start the same command again"


def test_metrics_stand_in_the_row_of_their_task():
    metrics = {
        "a/auc": 0.5,
        "bcd/mae": 2345.678,
        "a/gauc": math.nan,
        "loss": 1.5,
        "loss/a": 0.75,
        "loss/bcd": 3.0,
    }
    assert metric_table(metrics) == [
        "        auc  gauc    loss      mae",
        "a    0.5000     -  0.7500",
        "bcd                3.0000  2345.68",
        "all                1.5000",
    ]


def test_many_metrics_stand_below_each_other():
    names = [f"a_metric_with_a_long_name_{i}" for i in range(4)]
    metrics = {f"{task}/{name}": 0.5 for name in names for task in ("a", "b")} | {"loss": 1.5}
    assert metric_table(metrics) == [
        f"{'':34}a       b     all",
        *(f"{name}  0.5000  0.5000" for name in names),
        f"loss{'':41}1.5000",
    ]


def test_baselines_stand_below_the_model(caplog):
    caplog.set_level("INFO", logger="recsys")
    console = Console()
    baselines = {"popularity": {"ndcg@10": 0.0192}, "co-occurrence": {"ndcg@10": 0.07}}
    console.started(replace(RUN, baselines=baselines))
    console.evaluated(Evaluated(50, {"ndcg@10": 0.0814, "loss": 5.5}, True, 1.0))
    assert [record.message.strip() for record in caplog.records[-4:]] == [
        "ndcg@10    loss",
        "model           0.0814  5.5000",
        "popularity      0.0192       -",
        "co-occurrence   0.0700       -",
    ]


def test_a_model_without_tasks_has_a_single_row():
    assert metric_table({"hr@10": 0.5, "loss": 1.0}) == [" hr@10    loss", "0.5000  1.0000"]
