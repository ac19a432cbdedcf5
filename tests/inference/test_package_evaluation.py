"""Metrics of packages against those of evaluation. The package is the model itself, not compiled;
`tests/integration` has whole packages."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.data.loader import Loader
from recsys.errors import RecsysError
from recsys.inference.eager import EagerPackage
from recsys.inference.package_evaluation import evaluate_package
from recsys.models import build_model, layout_rule
from recsys.models.base import Model
from recsys.training import evaluator
from recsys.training.distributed import Processes
from tests.modules.pipelines import RETRIEVER, pipeline_of

ALONE = Processes(0, 1, torch.device("cpu"))
METRICS = "metrics { ndcg { k: 3 } } metrics { mrr {} } metrics { hit_rate { k: 10 } }"


@pytest.fixture(params=["REPLICATED", "SHARDED"])
def pipeline(request, tmp_path):
    """Thirty users of twenty items; the rows of a sharded table do not have the order of its vocabulary."""
    generator, ids = torch.Generator().manual_seed(0), list(range(500, 520))
    pq.write_table(pa.table({"id": ids}), tmp_path / "item_id.parquet")
    rows = []
    for user in range(30):
        items = [500 + item for item in torch.randperm(20, generator=generator).tolist()]
        # The last batch has no histories, so its queries are zeros for every model.
        events = user % 6 if user < 24 else 0
        rows.append(
            {
                "user_id": user,
                "request_time": 10_000,
                "uih_item_id": items[:events],
                "uih_timestamps": list(range(100, 100 + events)),
                "uih_actions": [1] * events,
                "candidate_item_id": items[6:7],
                "candidate_timestamps": [10_000],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return pipeline_of(
        RETRIEVER,
        f'data {{ vocabulary_dir: "{tmp_path}"  key_columns: "user_id"  eval_batch_size: 8 }}',
        f'data {{ test {{ parquet {{ paths: "{tmp_path}/rows.parquet" }} }} }}',
        f"model {{ embedding {{ placement: {request.param} }} retriever {{ {METRICS} }} }}",
    )


def loader_of(pipeline):
    return Loader.open(pipeline, "test", layout_rule(pipeline), mode="evaluate")


def test_a_package_has_the_metrics_of_its_model(pipeline):
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    expected = evaluator.evaluate(model, loader_of(pipeline), ALONE.device)
    actual = evaluate_package(EagerPackage(model), loader_of(pipeline), ALONE.device)
    assert 0.1 < actual.metrics["mrr"] < 0.9 and actual.difference is None
    assert actual.metrics == pytest.approx({name: expected[name] for name in actual.metrics}, abs=1e-6)
    assert expected.keys() - actual.metrics.keys() == {"loss"}


def test_the_difference_is_that_of_the_most_different_answer(pipeline):
    """The formula in float64, over all rows."""
    torch.manual_seed(0)
    model, changed = build_model(pipeline).eval(), build_model(pipeline).eval()
    changed.load_state_dict(model.state_dict())
    package, reference = EagerPackage(model), EagerPackage(changed)
    assert evaluate_package(package, loader_of(pipeline), ALONE.device, reference=reference).difference == 0
    with torch.no_grad():
        for weight in changed.mix.parameters():
            weight *= 1.001
    largest = 0.0
    with torch.no_grad():
        for batch in loader_of(pipeline).epoch(0):
            ours, theirs = model.score(batch).double(), changed.score(batch).double()
            largest = max(largest, ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item())
    actual = evaluate_package(package, loader_of(pipeline), ALONE.device, reference=reference)
    assert largest > 0 and actual.difference == pytest.approx(largest, rel=1e-5)
    reference.items = package.items + 3
    actual = evaluate_package(package, loader_of(pipeline), ALONE.device, reference=reference)
    assert actual.difference == pytest.approx((3 / reference.items.abs().clamp(min=1)).max().item())


def test_a_model_that_cannot_be_measured_says_so(pipeline, monkeypatch):
    model = build_model(pipeline).eval()
    monkeypatch.setattr(type(model), "answer_rows", Model.answer_rows)
    with pytest.raises(RecsysError, match="Retriever does not say how to measure the answers of its package"):
        evaluate_package(EagerPackage(model), loader_of(pipeline), ALONE.device)
