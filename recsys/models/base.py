"""What training, evaluation and export know about a model: forward, objective, metrics, score.

A model is single-device code in float32 parameters. `training` wraps it for many devices and `inference`
traces it; both call `build_model` and the methods below, and neither asks which model it is.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config import registry
from recsys.data.batch import Batch, LayoutRule
from recsys.modules.embedding import EmbeddingGroup


@dataclass(frozen=True, eq=False)
class Losses:
    """Sums over the targets of this rank, one entry a task; whoever holds all ranks divides.

    Attributes:
        names: of the tasks.
        sums: float32 [tasks], sum of loss x sample weight.
        counts: float32 [tasks], sum of sample weights.
        weights: factor of each task in the total.
    """

    names: tuple[str, ...]
    sums: Tensor
    counts: Tensor
    weights: tuple[float, ...]


MetricRows = Mapping[str, tuple[Tensor, ...]]
"""By task ("" in a model without tasks) the columns that `update` of the task's metrics takes, all [N]."""


class Model(nn.Module):
    """Base of all models.

    Attributes:
        pipeline: the resolved config that it was built from.
        precision: pb.FP32 or pb.BF16, the same in training, evaluation and export. Parameters are float32 in
            both.
        embed: every embedding table; TorchRec shards the collections in it.
        objective: `(outputs, batch) -> Losses`, in float32.
    """

    objective: nn.Module

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        self.pipeline = pipeline
        self.precision = pipeline.model.precision
        self.embed = EmbeddingGroup(pipeline)

    def forward(self, batch: Batch) -> Any:
        """The model's outputs, a dataclass that `objective` and `update_metrics` take."""
        raise NotImplementedError

    def forward_again(self, batch: Batch, before: Any) -> Any:
        """As `forward`, for another batch of one evaluation.

        Args:
            batch: as it was read.
            before: outputs of an earlier batch; what is the same for all of them need not be computed again.
        """
        return self(batch)

    def score(self, batch: Batch) -> Tensor:
        """float32, the one tensor that an exported model returns."""
        raise NotImplementedError

    def flops(self, batch: Batch) -> int:
        """FLOP that a forward pass and the objective need for this batch; see `recsys.modules.flops`.

        From sizes and host copies only: it waits for no device.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, Metric]:
        """New, empty metrics of the config by their names in logs."""
        raise NotImplementedError

    def metric_rows(self, outputs: Any, batch: Batch) -> MetricRows:
        """What `metrics()` take of a batch; a row is a candidate of the batch, in its order."""
        raise NotImplementedError

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: Batch) -> None:
        """Adds what the model said about a batch to `metrics()`."""
        add_rows(metrics, self.metric_rows(outputs, batch))

    @property
    def probabilities(self) -> tuple[str, ...]:
        """Keys of `metric_rows` whose first two columns are probabilities and labels of 0 or 1."""
        return ()

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision policy around a forward pass: with BF16 matrix products run in bfloat16."""
        if self.precision == pb.BF16:
            return torch.autocast(next(self.parameters()).device.type, dtype=torch.bfloat16)
        return nullcontext()


def add_rows(metrics: Mapping[str, Metric], rows: MetricRows) -> None:
    """Updates metrics, named `<task>/<metric>` or `<metric>`, with the rows of their task."""
    for name, metric in metrics.items():
        metric.update(*rows[name.rpartition("/")[0]])


def build_model(pipeline: pb.Pipeline) -> Model:
    """The model of a resolved pipeline, on the CPU, with new weights drawn from torch's global generator."""
    model = registry.pick(pipeline.model)
    return model.cls(model.config, pipeline=pipeline)


def layout_rule(pipeline: pb.Pipeline) -> LayoutRule:
    """How the reader lays out rows for the model of a resolved pipeline."""
    preprocessor = registry.pick(registry.pick(pipeline.model).config.preprocessor)
    return preprocessor.cls.layout_rule(preprocessor.config, pipeline)


def build_postprocessor(config: Any, embedding_dim: int) -> nn.Module:
    """The postprocessor of a model's message; without one vectors pass as they are."""
    if not config.HasField("postprocessor"):
        return Unchanged()
    chosen = registry.pick(config.postprocessor)
    return chosen.cls(chosen.config, embedding_dim=embedding_dim)


class Unchanged(nn.Module):
    """Stands where a postprocessor would."""

    def forward(self, values: Tensor, timestamps: Tensor) -> Tensor:
        """[n, E], as it is."""
        return values
