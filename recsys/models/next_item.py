"""`NextItemModel`: the base of models that rank all items of a catalogue as candidates for the next one."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config import features
from recsys.config.registry import pick
from recsys.data.batch import Batch
from recsys.models.base import MetricRows, Model
from recsys.modules.sequence import following
from recsys.ops import gather_rows


class NextItemModel(Model):
    """Base of models whose metrics depend on the ranks of candidates.

    Attributes:
        metric_choices: the metrics that the config chooses.
        leaves_out_repeated: True if targets that the user has had do not count.
    """

    metric_choices: list[pb.Metric]
    leaves_out_repeated: bool

    @abstractmethod
    def ranks(self, outputs: Any, batch: Batch) -> Tensor:
        """Returns the rank of each candidate in the catalogue, int64 [N]; 1 is the best."""

    @abstractmethod
    def answer_ranks(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> Tensor:
        """Returns `ranks` for an answer of `score`; see `Model.answer_rows`."""

    def metrics(self) -> dict[str, Metric]:
        """Builds the metrics, by their names."""
        chosen = [pick(choice) for choice in self.metric_choices]
        built = [metric.cls(metric.config) for metric in chosen]
        return {metric.name: metric for metric in built}

    def metric_rows(self, outputs: Any, batch: Batch) -> MetricRows:
        """Returns rank and weight of each candidate."""
        return self._weighted(self.ranks(outputs, batch), batch)

    def answer_rows(self, answer: Sequence[Tensor], items: Tensor | None, batch: Batch) -> MetricRows:
        """Returns rank and weight of each candidate for an answer of `score`."""
        return self._weighted(self.answer_ranks(answer, items, batch), batch)

    def _weighted(self, ranks: Tensor, batch: Batch) -> MetricRows:
        weights = torch.repeat_interleave(
            batch.sample_weight, batch.num_candidates, output_size=ranks.shape[0]
        )
        if self.leaves_out_repeated:
            weights = weights * ~batch.repeated
        return {"": (ranks, weights)}


def last_of_each(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns the last entry of each of B lists, [n, E] -> [B, E]; zeros for an empty list."""
    return gather_rows(values, torch.where(lengths > 0, lengths.cumsum(0) - 1, -1))


def position_weights(batch: Batch, weight_column: str) -> Tensor:
    """Returns the weight of each position, [U]: the weight of the event that it predicts.

    Args:
        batch: the batch.
        weight_column: column with weights of events or of rows; empty for the weights of rows alone.
    """
    count, row_weights = batch.uih_timestamps.shape[0], batch.sample_weight
    of_rows = bool(weight_column) and features.side_of(weight_column) == pb.USER
    if of_rows:
        row_weights = row_weights * batch.weights[weight_column]
    weights = torch.repeat_interleave(row_weights, batch.uih_lengths, output_size=count)
    if not weight_column or of_rows:
        return weights
    none = torch.zeros_like(batch.sample_weight)
    return weights * following(batch.weights[weight_column], batch.uih_lengths, last=none)
