"""What the console says."""

from pathlib import Path

from recsys.training.hooks import Outcome, Run, Trained
from recsys.training.hooks.console import by_task, describe, next_lines
from recsys.training.state import Best
from recsys.training.throughput import Rates

RUN = Run(Path("runs/my run"), "", 0, 200)


def test_a_line_has_what_one_looks_for():
    rates = Rates(batches_per_s=2, samples_per_s=1234.5, tokens_per_s=98765.4, data_wait=0.07)
    losses = {"click": 0.7, "time": 2.0}
    line = describe(Trained(50, 0, 1.25, losses, {"dense": 1e-3, "sparse": 0.02}, 3.0, rates, 3725), 200)
    assert line == (
        "step 50/200 (25 %)  loss 1.2500  click 0.7000  time 2.0000  lr 1.00e-03/2.00e-02  "
        "1,234 samples/s  98,765 tokens/s  data wait 7 %  1:02:05 left"
    )


def test_the_last_lines_are_commands_that_can_be_typed():
    outcome = Outcome(200, "all 200 steps are done", Path("c/step-00000200"), Best("auc", 0.75, 120))
    assert next_lines(outcome, RUN) == [
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


def test_after_a_signal_the_next_command_is_the_same_one():
    lines = next_lines(Outcome(7, "signal 15 asked for it", Path("c"), None, 15), RUN)
    assert lines[-1] == "to go on, start the same command again"


def test_metrics_stand_with_their_task():
    metrics = {"a/auc": 0.5, "b/mae": 2.0, "a/gauc": 0.25, "loss": 1.5, "loss/a": 0.75, "loss/b": 3.0}
    assert by_task(metrics) == [
        "loss 1.5000",
        "a: auc 0.5000  gauc 0.2500  loss 0.7500",
        "b: mae 2.0000  loss 3.0000",
    ]
    assert by_task({"hr@10": 0.5, "loss": 1.0}) == ["hr@10 0.5000  loss 1.0000"]
