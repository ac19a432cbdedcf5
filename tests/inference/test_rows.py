"""Long rows in pieces: the scores of whole rows, also where candidates see those of their group."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import config
from recsys import protos as pb
from recsys.inference import predictor
from recsys.inference.predictor import Predictor
from recsys.models import build_model
from recsys.scoring.signature import ScoringGraph, flatten

HSTU = "model.ranker.mixer.hstu"


def pipeline(*overrides: str) -> pb.Pipeline:
    return config.prepare("tests/integration/tiny.config", overrides).pipeline


@pytest.mark.parametrize("group", [1, 3])
def test_a_row_in_pieces_has_the_scores_of_the_whole_row(group, monkeypatch):
    resolved = pipeline(f"{HSTU}.mask.target_group_size={group}")
    torch.manual_seed(0)
    graph = ScoringGraph(build_model(resolved).eval())
    sizes = []

    def run(batch):
        sizes.append(batch.num_candidates.tolist())
        with torch.no_grad():
            return graph(*flatten(batch))

    names = [task.name for task in resolved.model.ranker.tasks]
    outputs = SimpleNamespace(outputs=names, device="cpu")
    package = SimpleNamespace(pipeline=resolved, items=None, description=outputs, run=run, cached=None)
    table = pq.read_table("tests/data/kuairand/test.parquet")
    lists = [name for name in table.column_names if name.startswith("candidate_")]
    row = next(row for row in table.to_pylist() if len(row["uih_item_id"]) >= 10)
    pool = table.slice(0, 40).to_pylist()
    row |= {name: [value for donor in pool for value in donor[name]][:40] for name in lists}
    row["candidate_timestamps"] = [row["request_time"]] * 40
    long = pa.Table.from_pylist([row], table.schema)
    monkeypatch.setitem(predictor.LONGEST_ROW, "cpu", 16)
    actual = Predictor(package).table(long).column("is_click").to_pylist()[0]
    assert sizes == [[16, 16, 8] if group == 1 else [18, 18, 4]] and len(set(actual)) > 5
    monkeypatch.setitem(predictor.LONGEST_ROW, "cpu", 1000)
    whole = Predictor(package).table(long).column("is_click").to_pylist()[0]
    np.testing.assert_allclose(actual, whole, atol=1e-6)
