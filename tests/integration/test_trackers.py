"""The commands send a run to tracking services, here to stand-ins."""

import json
import sys

import pyarrow.parquet as pq

from tests.integration.runs import evaluate, flags, records, train
from tests.training.hooks import stand_ins

SHORT = (
    "train.num_steps=2",
    "train.schedule.warmup_steps=1",
    "train.evaluation.every_steps=2",
    "train.hooks=[{wandb {}}, {mlflow {}}]",
)


def test_services_have_what_the_run_folder_has(tmp_path, monkeypatch):
    wandb, mlflow = stand_ins.WandbService(), stand_ins.MlflowStore()
    for name, module in {"wandb": wandb.module, **mlflow.modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    rows = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, 64)
    pq.write_table(rows, tmp_path / "test.parquet")
    test = f"data.test={{parquet {{paths: '{tmp_path / 'test.parquet'}'}}}}"
    assert train(tmp_path, *SHORT, test) == 0
    assert evaluate("--run-dir", str(tmp_path)) == 0
    trained, (evaluated,) = records(tmp_path), records(tmp_path, "evaluation").values()
    run, tested = wandb.runs
    (stored,) = mlflow.runs.values()
    assert {step: row["train/loss"] for step, row in run.rows.items()} == {
        step: record["loss"] for step, record in trained.items()
    }
    name = "is_click/auc"
    assert run.rows[2][f"validation/{name}"] == evaluated["metrics"][name]
    measured = json.loads((tmp_path / "test_metrics.json").read_text())["metrics"]
    assert tested.summary[f"test/{name}"] == measured[name]
    assert [(point.step, point.value) for point in stored.history[f"test/{name}"]] == [(2, measured[name])]
    assert run.arguments["config"]["model.embedding_dim"] == 16
    assert stored.files["config.resolved"] == (tmp_path / "config.resolved").read_text(encoding="utf-8")
    assert (run.exit_code, stored.info.status) == (0, "FINISHED")


def test_a_missing_library_is_found_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    from recsys import train as train_command

    for more in ([], ["--validate"]):
        assert train_command.main([*flags(tmp_path, *SHORT), *more]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("--set train.hooks") and "pip install 'generative-recsys[wandb]'" in shown
    assert list(tmp_path.iterdir()) == []
