"""`Model`: the interface of every model to training, evaluation and export; and `build_model`.

A model is single-device code with float32 parameters. `training` wraps it for many devices, and `inference`
traces it. Both call `build_model` and the methods below and never ask for the class of a model. Facts that
are needed before a model is built are in its declaration (`config.declarations`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import mixer_of
from recsys.data.batch import Batch, LayoutRule
from recsys.errors import RecsysError
from recsys.modules.embedding import EmbeddingGroup
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.outside_tables import LookUp
from recsys.modules.precision import COMPUTE_DTYPES


@dataclass(frozen=True, eq=False)
class Losses:
    """Sums of losses over the targets of this rank, by task. Training adds up the ranks, then divides.

    Attributes:
        names: names of the tasks.
        sums: float32 [tasks], sum of loss x sample weight.
        counts: float32 [tasks], sum of sample weights.
        weights: factor of each task in the total loss.
    """

    names: tuple[str, ...]
    sums: Tensor
    counts: Tensor
    weights: tuple[float, ...]


MetricRows = Mapping[str, tuple[Tensor, ...]]
"""For each task ("" without tasks), the arguments of its metrics' `update`, all [N]."""


class Model(nn.Module):
    """Base class of all models.

    A subclass may name its parts freely, except that its mixer must be `mix`.

    Attributes:
        pipeline: the resolved config that the model was built from.
        precision: pb.FP32, pb.BF16 or pb.FP16, the same in training, evaluation and export. Parameters are
            float32 in all of them, except sharded tables with `table_precision: FP16`.
        embed: every embedding table; TorchRec shards the collections in it.
        objective: `(outputs, batch) -> Losses`, in float32.
    """

    objective: nn.Module

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        self.pipeline = pipeline
        self.precision = pipeline.model.precision
        self.embed = EmbeddingGroup(pipeline)

    @classmethod
    def layout_rule(cls, config: Any, pipeline: pb.Pipeline) -> LayoutRule:
        """Returns the rule by which the reader lays out rows for the model: that of its preprocessor."""
        preprocessor = registry.pick(config.preprocessor)
        return preprocessor.cls.layout_rule(preprocessor.config, pipeline)

    @classmethod
    def kernels(cls, config: Any, pipeline: pb.Pipeline, device: str) -> Iterator[AttentionUse]:
        """Yields the attention ops that the model of a resolved config will call on `cpu` or `cuda`."""
        declared = mixer_of(pipeline)
        if declared is None:
            return iter(())
        mixer = registry.lookup(type(declared.config))
        return mixer.kernels(declared.config, declared.path, pipeline.model, device)

    @property
    def mixer(self) -> Mixer | None:
        """The mixer, whose layers `--dry-run` draws; None if the model has none."""
        return self._modules.get("mix")

    def forward(self, batch: Batch) -> Any:
        """Returns the model's outputs, a dataclass that `objective` and `update_metrics` take."""
        raise NotImplementedError

    def forward_again(self, batch: Batch, before: Any) -> Any:
        """Computes `forward` for another batch of the same evaluation.

        Args:
            batch: the batch as it was read.
            before: outputs of an earlier batch, from which results that all batches share can be reused.
        """
        return self(batch)

    def score(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the answer of an exported model, float32; the declaration's `outputs` names its columns.

        A model that finds items answers with their scores, float32 [B, K], and the items, int64 [B, K]: rows
        of the item table less 1, and -1 with the score -inf where a row has fewer than K.
        """
        raise NotImplementedError

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the vectors of the batch's shared items, float32 [V, E], if the model searches items."""
        raise NotImplementedError

    def divide_catalogue(self, rank: int, world_size: int) -> None:
        """Makes training compare the queries of all ranks with the items of each, `features.catalogue_rows`.

        Training calls it if `features.divides_catalogue` says so; batches then have a rank's items only.
        """
        raise NotImplementedError

    def item_tower(self) -> nn.Module | None:
        """Returns a graph from features of items to their vectors (see `models.item_tower`), or None."""
        return None

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of a forward pass and the objective for this batch; see `recsys.modules.flops`.

        It reads only sizes and host copies, and never waits for a device.
        """
        raise NotImplementedError

    def exact_recall(self, batch: Batch) -> dict[str, Tensor]:
        """Counts the exactly best items of the batch's rows that the model finds, if it finds items itself.

        Returns:
            By name: float64 [2], the items that are found, and those that there are to find.
        """
        raise NotImplementedError

    def weight_gains(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the gains of the candidates for several weights, if a weight mixes the model's scores.

        Returns:
            By name: float64 [2], the sum of gains, and the number of candidates.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, Metric]:
        """Builds new, empty metrics as configured, by their names in logs."""
        raise NotImplementedError

    def metric_rows(self, outputs: Any, batch: Batch) -> MetricRows:
        """Returns the arguments for updating `metrics()`, with an entry for each candidate of the batch."""
        raise NotImplementedError

    def answer_rows(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> MetricRows:
        """Returns `metric_rows` for an answer of `score`, which is all that an exported package gives.

        Args:
            answer: the tensor or the two tensors that `score` returns for the batch; another program may have
                computed them.
            items: `item_vectors` of the whole catalogue, if the model searches items; else None.
            batch: the batch, as it was read for evaluation.

        Raises:
            RecsysError: the model does not implement it.
        """
        raise RecsysError(
            f"{type(self).__name__} does not say how to measure the answers of its packages (its method "
            "`answer_rows`): evaluate the run with --run-dir instead"
        )

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: Batch) -> None:
        """Adds the model's outputs for a batch to `metrics()`."""
        add_rows(metrics, self.metric_rows(outputs, batch))

    @property
    def evaluation_waits(self) -> bool:
        """Whether evaluation reads numbers on the device, so that it cannot be recorded in a CUDA graph."""
        return False

    @property
    def probabilities(self) -> tuple[str, ...]:
        """The keys of `metric_rows` whose first two columns are probabilities and labels of 0 or 1."""
        return ()

    def autocast(self) -> AbstractContextManager[Any]:
        """Applies the precision policy to a forward pass: matrix products run in bfloat16 or float16."""
        if self.precision == pb.FP32:
            return nullcontext()
        return torch.autocast(next(self.parameters()).device.type, dtype=COMPUTE_DTYPES[self.precision])


def add_rows(metrics: Mapping[str, Metric], rows: MetricRows) -> None:
    """Updates metrics, named `<task>/<metric>` or `<metric>`, with the rows of their task."""
    for name, metric in metrics.items():
        metric.update(*rows[name.rpartition("/")[0]])


class CollectedRows:
    """Updates metrics with the rows of several batches at once.

    An update costs some ten operations for each metric, whatever the number of rows: for small batches, more
    time than the model takes.

    Args:
        metrics: metrics by name, as `add_rows` takes them.
    """

    MOST = 1 << 18
    """Rows from which on metrics are updated: some MB for each task."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._parts: list[MetricRows] = []
        self._count = 0

    def add(self, rows: MetricRows) -> None:
        """Collects the rows of a batch."""
        self._parts.append(rows)
        self._count += max((len(columns[0]) for columns in rows.values()), default=0)
        if self._count >= self.MOST:
            self.update()

    def update(self) -> None:
        """Updates the metrics with what has been collected."""
        if self._parts:
            columns = {
                task: zip(*(part[task] for part in self._parts), strict=True) for task in self._parts[0]
            }
            add_rows(self._metrics, {task: tuple(map(torch.cat, parts)) for task, parts in columns.items()})
        self._parts, self._count = [], 0


def build_model(
    pipeline: pb.Pipeline, *, whole: bool = True, outside: Mapping[str, LookUp] | None = None
) -> Model:
    """Builds the model of a resolved pipeline on the CPU, with weights from torch's global generator.

    Args:
        pipeline: resolved.
        whole: allocate large sharded tables too. False leaves them on the meta device, for
            `training.distributed.shard`, which allocates on each rank its part of them.
        outside: functions that look up rows of tables that the model does not get, by the table's name.
    """
    model = registry.pick(pipeline.model)
    built = model.cls(model.config, pipeline=pipeline)
    if outside:
        built.embed.move_outside(outside)
    if whole:
        built.embed.materialize()
    return built


def layout_rule(pipeline: pb.Pipeline) -> LayoutRule:
    """Returns the rule by which the reader lays out rows for the model of a resolved pipeline."""
    model = registry.pick(pipeline.model)
    return model.cls.layout_rule(model.config, pipeline)


def build_postprocessor(config: Any, embedding_dim: int) -> nn.Module:
    """Builds the postprocessor that a model's message chooses, or `Unchanged` if it chooses none."""
    if not config.HasField("postprocessor"):
        return Unchanged()
    chosen = registry.pick(config.postprocessor)
    return chosen.cls(chosen.config, embedding_dim=embedding_dim)


class Unchanged(nn.Module):
    """Stands in for a postprocessor and returns its input."""

    def forward(self, values: Tensor, timestamps: Tensor) -> Tensor:
        """Returns `values`, [n, E], unchanged."""
        return values
