"""Tasks that share experts, a mask of labels and a row's candidates: from columns to predictions and back."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import config
from recsys import export as export_command
from recsys import predict as predict_command
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.scoring.signature import ScoringGraph, flatten
from recsys.training import checkpoint
from tests.integration.runs import CONFIG, evaluate, train

ROWS = 300
BITS = {"is_click": 0, "is_like": 1, "long_view": 6}
TASKS = """[
  {name: "clicked" label_bits: 0 loss {jrc {}} metrics {auc {}} metrics {log_loss {}}},
  {name: "liked" label_bits: [1, 6] loss {binary_cross_entropy {label_smoothing: 0.1}} metrics {auc {}}},
  {name: "watch_time" loss {pairwise {mean_squared_error {log1p: true}}} metrics {mae {}}}
]"""


def with_masks(split: str, folder) -> str:
    """A copy of the sample's rows whose labels are bits of one column."""
    table = pq.read_table(f"tests/data/kuairand/{split}.parquet").slice(0, ROWS)
    columns = {name: table[f"candidate_{name}"].combine_chunks() for name in BITS}
    masks = sum(columns[name].flatten().to_numpy().astype(np.int64) << bit for name, bit in BITS.items())
    lists = pa.ListArray.from_arrays(columns["is_click"].offsets, pa.array(masks))
    table = table.drop_columns([f"candidate_{name}" for name in BITS])
    path = folder / f"{split}.parquet"
    pq.write_table(table.append_column("candidate_actions", lists), path)
    return str(path)


def flat(table: pa.Table, column: str) -> np.ndarray:
    return table[column].combine_chunks().flatten().to_numpy()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of pairs of a positive and a negative in the right order, ties half."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


class Trained(NamedTuple):
    """A run, the config that it was made with, its test rows and what evaluation says about them."""

    run: Path
    overrides: list[str]
    rows: str
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("tasks")
    paths = {split: with_masks(split, folder) for split in ("train", "validation")}
    overrides = [f'data.{split}.parquet.paths=["{path}"]' for split, path in paths.items()]
    overrides += [f"model.ranker.tasks={TASKS}", "model.ranker.head={mmoe {num_experts: 3 expert_dim: 8}}"]
    overrides += ["train.num_steps=12", "train.evaluation={}"]
    assert train(folder / "run", *overrides) == 0
    test = f'data.test={{parquet {{paths: "{paths["validation"]}"}}}}'
    assert evaluate("--run-dir", str(folder / "run"), "--set", test) == 0
    metrics = json.loads((folder / "run" / "test_metrics.json").read_text())["metrics"]
    return Trained(folder / "run", overrides, paths["validation"], metrics)


def check(actual: dict[str, np.ndarray], metrics: dict[str, float]) -> None:
    """Predictions in the order of the file, against the labels that the masks were made of."""
    original = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, ROWS)
    clicked, liked = flat(original, "candidate_is_click"), flat(original, "candidate_is_like")
    liked = np.maximum(liked, flat(original, "candidate_long_view"))
    p = actual["clicked"]
    assert auc(p, clicked) == pytest.approx(metrics["clicked/auc"], abs=1e-5)
    log_loss = -np.where(clicked == 1, np.log(p), np.log1p(-p)).mean()
    assert log_loss == pytest.approx(metrics["clicked/log_loss"], rel=1e-4)
    assert auc(actual["liked"], liked) == pytest.approx(metrics["liked/auc"], abs=1e-5)
    error = np.abs(actual["watch_time"] - flat(original, "candidate_watch_time")).mean()
    assert error == pytest.approx(metrics["watch_time/mae"], rel=1e-4)


def test_the_scoring_graph_predicts_with_the_evaluated_quality(trained):
    pipeline = config.prepare(CONFIG, trained.overrides).pipeline
    model = build_model(pipeline).eval()
    checkpoint.load_weights(checkpoint.find(trained.run / "checkpoints", "best"), model)
    loader = Loader.open(pipeline, "validation", layout_rule(pipeline), mode="predict")
    batches = list(loader.epoch())
    graph = ScoringGraph(model).eval()
    scores = torch.cat([graph(*flatten(batch)) for batch in batches]).detach().numpy()
    check(dict(zip(("clicked", "liked", "watch_time"), scores.T, strict=True)), trained.metrics)


@pytest.mark.slow
def test_the_package_predicts_with_the_evaluated_quality(trained, tmp_path, monkeypatch):
    """By the commands, in this process but for the proof that the exporter makes in a fresh one."""

    def call(command, *flags: object) -> None:
        monkeypatch.setattr(sys, "argv", ["recsys", *map(str, flags)])
        assert command.main() == 0

    call(export_command, "--run-dir", trained.run, "--output", tmp_path / "package")
    # The input of a prediction has no labels.
    rows = pq.read_table(trained.rows).drop_columns(["candidate_actions", "candidate_watch_time"])
    pq.write_table(rows, tmp_path / "rows.parquet")
    output = tmp_path / "predictions"
    given = ("--input", tmp_path / "rows.parquet", "--output", output)
    call(predict_command, "--package", tmp_path / "package", *given)
    actual = pq.read_table(output)
    check({name: flat(actual, name) for name in ("clicked", "liked", "watch_time")}, trained.metrics)
