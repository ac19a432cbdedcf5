"""Every model keeps what training and export rely on; a new one is found through the registry."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder

from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import model_of
from recsys.models import build_model, layout_rule
from recsys.models.base import CollectedRows
from recsys.training.recorded_step import TotalsOfVectors
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, generator_pipeline, pipeline_of, random_rows

PIPELINES = {"ranker": RANKER, "retriever": RETRIEVER}
CATEGORY = 'features { name: "category"  sides: HISTORY  id { hash { num_buckets: 7 } } }'
SIZES = [(3, 2), (0, 1), (6, 4), (2, 0), (1, 3)]


@pytest.fixture(params=sorted(registry.registered(pb.Model)))
def pipeline(request, tmp_path):
    if request.param == "generator":  # reads files
        return generator_pipeline(tmp_path, np.arange(40).reshape(20, 2) % 4, CATEGORY)
    assert request.param in PIPELINES, f"name a pipeline with a {request.param} in PIPELINES"
    return pipeline_of(PIPELINES[request.param])


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class LossOfBatch(nn.Module):
    """Model and objective as the pipeline runs them: (loss to differentiate, what to report)."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.totals_of_vectors = TotalsOfVectors(model)
        self.total = Total()

    def forward(self, batch):
        return self.total(self.totals_of_vectors(self.model.embed.look_up(batch.ids), batch))


class Total(nn.Module):
    def forward(self, totals):
        tasks = len(totals.names)
        total = (totals.losses / totals.sums[tasks : 2 * tasks]).sum()
        return total, total.detach()


def test_layout_rules():
    ranker, retriever = layout_rule(pipeline_of(RANKER)), layout_rule(pipeline_of(RETRIEVER))
    assert (ranker.num_contextual, ranker.targets) == (2, True)
    assert (retriever.num_contextual, retriever.targets) == (0, False)


def test_weights_are_a_function_of_the_seed(pipeline):
    torch.manual_seed(5)
    first = build_model(pipeline).state_dict()
    torch.manual_seed(5)
    second = build_model(pipeline).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.dtype == torch.float32 for value in build_model(pipeline).parameters())


@pytest.mark.parametrize("precision", [pb.FP32, pb.BF16])
def test_torchrecs_pipeline_trains_it_like_a_plain_loop(pipeline, precision, one_process):
    pipeline.model.precision = precision
    model = build_model(pipeline)
    batches = [batch_of(pipeline, random_rows(pipeline, SIZES, seed=seed)) for seed in range(4)]

    plain = LossOfBatch(copy.deepcopy(model))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for batch in batches:
        loss, seen = plain(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(seen.item())

    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    sharded = DistributedModelParallel(
        LossOfBatch(model),
        device=torch.device("cpu"),
        sharders=[EmbeddingCollectionSharder(fused_params=fused)],
    )
    dense = [p for name, p in sharded.named_parameters() if ".tables." not in name]
    stream = iter(batches)
    ahead = TrainPipelineSparseDist(
        sharded, torch.optim.SGD(dense, lr=0.1), torch.device("cpu"), execute_all_batches=True
    )
    actual = [ahead.progress(stream).item() for _ in batches]
    assert len(ahead._pipelined_modules) == len(model.embed.tables)
    assert actual == pytest.approx(expected, rel=1e-5 if precision == pb.FP32 else 1e-3)
    assert len(set(expected)) == len(expected)


def test_metrics_start_empty_and_apart(pipeline):
    model = build_model(pipeline).eval()
    first, second = model.metrics(), model.metrics()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    with torch.no_grad():
        model.update_metrics(first, model(batch), batch)
    assert first.keys() == second.keys()
    assert all(torch.isnan(metric.compute()) for metric in second.values())
    assert any(torch.isfinite(metric.compute()) for metric in first.values())


def test_collected_rows_give_the_metrics_of_batches(pipeline, monkeypatch):
    """Batches of 10, 7, 10 and 2 rows reach the metrics in two updates."""
    monkeypatch.setattr(CollectedRows, "MOST", 15)
    model = build_model(pipeline).eval()
    batches = [
        batch_of(pipeline, random_rows(pipeline, sizes)) for sizes in (SIZES, SIZES[:4], SIZES, [(5, 2)])
    ]
    expected, actual = model.metrics(), model.metrics()
    collected, updates = CollectedRows(actual), []
    for name, metric in actual.items():
        monkeypatch.setattr(metric, "update", noted(metric.update, name, updates))
    with torch.no_grad():
        for batch in batches:
            model.update_metrics(expected, model(batch), batch)
            collected.add(model.metric_rows(model(batch), batch))
    collected.update()
    collected.update()
    values = {name: metric.compute().item() for name, metric in expected.items()}
    assert {name: metric.compute().item() for name, metric in actual.items()} == pytest.approx(
        values, rel=1e-12, nan_ok=True
    )
    first = next(iter(values))
    assert [rows for name, rows in updates if name == first] == [17, 12]


def noted(update, name, updates):
    """Returns the update of a metric that also notes its name and its number of rows."""

    def run(*columns):
        updates.append((name, len(columns[0])))
        update(*columns)

    return run


def test_an_answer_is_measured_like_outputs(pipeline):
    """A package gives answers of `score`, from which the same metrics follow."""
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    with torch.no_grad():
        items = None if model_of(pipeline).item_feature is None else model.item_vectors(batch)
        actual, expected = (
            model.answer_rows((model.score(batch),), items, batch),
            model.metric_rows(model(batch), batch),
        )
    assert actual.keys() == expected.keys()
    for name, rows in expected.items():
        assert len(rows[0]) == 10 and len(set(rows[0].tolist())) > 3
        for ours, theirs in zip(actual[name], rows, strict=True):
            torch.testing.assert_close(ours, theirs)
