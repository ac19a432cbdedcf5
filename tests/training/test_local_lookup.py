"""Sharded tables of one process, looked up without exchange, against TorchRec's exchange with itself."""

import logging
from dataclasses import replace

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor

from recsys import config
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import local_lookup, sharding_plan
from recsys.training.distributed import process_group
from recsys.training.recorded_step import Recorder
from recsys.training.session import open_session
from recsys.training.step_pipeline import StepPipeline
from recsys.training.train_step import TrainStep
from recsys.training.trainer import step_pipeline

QUICKSTART = "configs/quickstart.config"
STATE = "optimizer.model.embed.tables.dim_32.embeddings.item_id_table.weight.item_id_table.momentum1"
SMALL = (
    "data.num_workers=0",
    "data.batch_size=8",
    "train.num_steps=4",
    "model.ranker.preprocessor.contextual.dropout=0",
    "model.ranker.mixer.hstu.dropout=0",
    # Two kernels in one collection, and a collection of its own.
    "model.embedding.tables=["
    '{table: "author_id" table_precision: FP16}, {table: "tag" placement: REPLICATED}]',
)


def trained(folder, *, local, padded=False):
    """All tensors after four steps, and the looked-up vectors of a batch before them."""
    pipeline = config.prepare(QUICKSTART, SMALL).pipeline
    with process_group() as processes:
        session = open_session(pipeline, folder, processes)
        embed = session.model.embed
        assert set(embed.local) == {"dim_32"}
        assert len(embed.local["dim_32"]._kernels) == 2
        if not local:
            embed.local = {}
        if padded:
            session.step.recorder = Recorder(
                session.model, session.step.totals_of_vectors, pipeline, record=False
            )
        steps = step_pipeline(session)
        assert isinstance(steps, StepPipeline if local else TrainPipelineSparseDist)
        loader = Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)
        with torch.no_grad():
            vectors = embed(next(loader.epoch(0)))
        batches = session.batches()
        for _ in range(4):
            steps.progress(batches)
        tensors = {name: whole(tensor).clone() for name, tensor in session._tensors().items()}
        del session, steps, embed, batches
    return tensors, vectors


def test_padded_steps_train_all_tables_alike(tmp_path, alone):
    """Tables of two kernels and a replicated one; sums of gradients are rounded differently."""
    (expected, _), (actual, _) = alone, trained(tmp_path, local=True, padded=True)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor.double()).norm()
        assert difference <= 1e-3 * tensor.double().norm(), name


def whole(tensor):
    return tensor.local_shards()[0].tensor if isinstance(tensor, ShardedTensor) else tensor


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Tensors and vectors without exchange."""
    return trained(tmp_path_factory.mktemp("alone"), local=True)


def test_weights_and_states_are_those_of_the_exchange_bit_by_bit(tmp_path, alone):
    (expected, looked_up), (actual, vectors) = trained(tmp_path, local=False), alone
    assert looked_up.keys() == vectors.keys()
    assert all(torch.equal(looked_up[name], vectors[name]) for name in vectors)
    assert expected.keys() == actual.keys()
    assert torch.count_nonzero(actual[STATE])
    assert [name for name in actual if not torch.equal(expected[name], actual[name])] == []


def test_a_table_that_is_divided_by_columns_is_exchanged(tmp_path, caplog):
    chosen = (*SMALL, "train.sparse_optimizer={sgd {lr: 0.1}}")
    with process_group() as processes:
        plan = plan_of(config.prepare(QUICKSTART, chosen).pipeline)
        tables = [replace(t, sharding="COLUMN_WISE", ranks=[0, 0]) for t in plan.tables]
        replace(plan, tables=tables).write(tmp_path)
        divided = (*chosen, f"train.sharding_plan={tmp_path / sharding_plan.FILE_NAME}")
        with caplog.at_level(logging.INFO, logger=local_lookup.__name__):
            session = open_session(config.prepare(QUICKSTART, divided).pipeline, tmp_path, processes)
        assert session.model.embed.local == {}
        (message,) = [x.getMessage() for x in caplog.records if x.name == local_lookup.__name__]
        assert "divided by columns" in message
        steps = step_pipeline(session)
        assert isinstance(steps, TrainPipelineSparseDist)
        assert steps.progress(session.batches()).wait().samples == 8
        del session, steps


def plan_of(pipeline):
    return sharding_plan.make_plan(TrainStep(build_model(pipeline)), pipeline, 1, "cpu", 2**40)
