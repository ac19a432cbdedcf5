"""The choice of the best evaluation, and evaluation without side effects; metrics have their own tests."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recsys import config
from recsys import protos as pb
from recsys.models.base import Losses
from recsys.training.distributed import process_group
from recsys.training.evaluator import BestMetric, evaluate
from recsys.training.local_lookup import kernels_of
from recsys.training.session import open_session
from recsys.training.state import Best
from recsys.training.trainer import step_pipeline
from tests.integration.runs import CONFIG

NAN = math.nan


@pytest.mark.parametrize(
    ("higher", "value", "best", "reached"),
    [
        (True, 0.5, None, True),
        (True, NAN, None, False),
        (True, 0.6, Best("auc", 0.5, 1), True),
        (True, 0.5, Best("auc", 0.5, 1), False),
        (True, NAN, Best("auc", 0.5, 1), False),
        (False, 0.4, Best("auc", 0.5, 1), True),
        (False, 0.6, Best("auc", 0.5, 1), False),
        (True, 0.1, Best("another", 0.5, 1), True),
    ],
)
def test_better(higher, value, best, reached):
    assert BestMetric("auc", higher).reached(value, best) is reached


class Model(nn.Module):
    """One number a batch; draws random numbers on the way."""

    def __init__(self):
        super().__init__()
        self.pipeline = pb.Pipeline()
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        torch.rand(3)
        return self.dropout(batch.values)

    def forward_again(self, batch, before):
        assert before.tolist() == [1.0]
        return self(batch)

    def metrics(self):
        return {"auc": SimpleNamespace(higher_is_better=True, to=lambda _: Mean())}

    def metric_rows(self, outputs, batch):
        return {"": (outputs,)}

    def objective(self, outputs, batch):
        count = torch.tensor(float(len(outputs)))
        return Losses(
            ("a", "b"), torch.stack([outputs.sum(), 2 * outputs.sum()]), count.expand(2), (1.0, 0.5)
        )


class Mean:
    def __init__(self):
        self.seen = []

    def update(self, values):
        self.seen += values.tolist()

    def compute(self):
        return torch.tensor(self.seen).mean()


class Batch:
    def __init__(self, *values: float):
        self.values = torch.tensor(values)

    def to(self, _device):
        return self


BATCHES = [Batch(1.0), Batch(2.0, 6.0), Batch(100.0)]
LOADER = SimpleNamespace(first=lambda limit: iter(BATCHES[:limit]))


def test_values_are_over_rows_and_the_random_numbers_go_on_as_before():
    model = Model().train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    actual = evaluate(model, LOADER, torch.device("cpu"), max_batches=2)
    assert actual == {"auc": 3.0, "loss": 3.0 + 0.5 * 6.0, "loss/a": 3.0, "loss/b": 6.0}
    assert model.training
    assert torch.equal(torch.rand(4), expected)


def test_the_goal_of_a_config():
    assert BestMetric.of(Model(), pb.Evaluation(best_metric="auc")) == BestMetric("auc", True)
    assert BestMetric.of(Model(), pb.Evaluation()) == BestMetric("loss", False)


def test_fused_optimizers_count_no_batch_of_an_evaluation(tmp_path):
    pipeline = config.prepare(CONFIG, ["data.num_workers=0"]).pipeline
    with process_group() as processes:
        session = open_session(pipeline, tmp_path, processes)
        (kernel, *_) = kernels_of(next(iter(session.model.embed.tables.values())))
        step_pipeline(session).progress(session.batches())
        evaluate(session.model, session.validation, processes.device, max_batches=2)
        assert (kernel.emb_module.iter_cpu.item(), kernel.emb_module.iter.item()) == (1, 1)
        del session, kernel
