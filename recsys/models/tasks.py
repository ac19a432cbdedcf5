"""Predictions of tasks for candidates: what every family of models with `Task`s shares."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config.registry import pick
from recsys.data.batch import Batch
from recsys.models.base import Losses, MetricRows
from recsys.modules.losses import RankingLoss


@dataclass(frozen=True, eq=False)
class TaskOutputs:
    """Outputs for N candidates.

    Attributes:
        logits: float32 [N, L], the logits of all tasks side by side; each task has as many as its loss needs.
        predictions: float32 [N] for each task: a probability, or a value in the label's unit.
    """

    logits: Tensor
    predictions: dict[str, Tensor]

    def scores(self) -> Tensor:
        """Returns the predictions as float32 [N, tasks], in the config's order of tasks."""
        return torch.stack(list(self.predictions.values()), dim=1)

    @staticmethod
    def joined(parts: "Sequence[TaskOutputs]") -> "TaskOutputs":
        """Joins the outputs of consecutive candidates."""
        predictions = [part.predictions for part in parts]
        return TaskOutputs(
            torch.cat([part.logits for part in parts]),
            {name: torch.cat([by_task[name] for by_task in predictions]) for name in predictions[0]},
        )


class TaskLosses(nn.Module):
    """The objective of a model with tasks: each task's loss, summed over candidates by their row's weight."""

    def __init__(self, tasks: Sequence[pb.Task]):
        super().__init__()
        self.names = tuple(task.name for task in tasks)
        self.weights = tuple(task.weight for task in tasks)
        chosen = [pick(task.loss) for task in tasks]
        self.losses = nn.ModuleList(loss.cls(loss.config) for loss in chosen)

    def forward(self, outputs: TaskOutputs, batch: Batch) -> Losses:
        """Returns sums and counts over the candidates of this rank."""
        weights = per_candidate(batch.sample_weight, batch)
        compares = any(loss.compares for loss in self.losses)
        rows = batch.layout.targets_only().layout if compares else None
        sums = [
            (loss(logits, batch.labels[name], rows) * weights).sum()
            for name, loss, logits in zip(
                self.names, self.losses, by_task(outputs.logits, self.losses), strict=True
            )
        ]
        counts = weights.sum().expand(len(sums))
        return Losses(self.names, torch.stack(sums), counts, self.weights)

    @property
    def probabilities(self) -> tuple[str, ...]:
        """The tasks with a binary loss, whose predictions are probabilities."""
        losses = zip(self.names, self.losses, strict=True)
        return tuple(name for name, loss in losses if loss.kind == "binary")


class TaskPredictions(nn.Module):
    """Converts the head's logits to each task's predictions, as its loss defines them, in float32."""

    def __init__(self, names: Sequence[str], losses: nn.ModuleList):
        super().__init__()
        self.names = tuple(names)
        self.losses = losses

    def forward(self, logits: Tensor) -> TaskOutputs:
        """Converts logits [N, L] of any float type, task by task."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        predictions = {
            name: loss.predict(task_logits)
            for name, loss, task_logits in zip(
                self.names, self.losses, by_task(logits, self.losses), strict=True
            )
        }
        return TaskOutputs(logits, predictions)


def task_metrics(tasks: Iterable[pb.Task]) -> dict[str, Metric]:
    """Builds the metrics of all tasks, named `<task>/<metric>`."""
    metrics = {}
    for task in tasks:
        for choice in task.metrics:
            chosen = pick(choice)
            metric = chosen.cls(chosen.config)
            metrics[f"{task.name}/{metric.name}"] = metric
    return metrics


def task_rows(outputs: TaskOutputs, batch: Batch) -> MetricRows:
    """Returns predictions, labels, weights and groups of the candidates, for each task."""
    weights = per_candidate(batch.sample_weight, batch)
    groups = per_candidate(batch.group, batch)
    return {
        task: (predictions, batch.labels[task], weights, groups)
        for task, predictions in outputs.predictions.items()
    }


def by_task(logits: Tensor, losses: Iterable[RankingLoss]) -> list[Tensor]:
    """Cuts [N, L] into the logits of each loss: [N], or [N, num_logits] if that is more than 1."""
    parts = logits.split([loss.num_logits for loss in losses], dim=1)
    return [part.squeeze(1) if part.shape[1] == 1 else part for part in parts]


def per_candidate(values: Tensor, batch: Batch) -> Tensor:
    """Repeats the value of each row, [B], for each of its candidates, [N]."""
    count = batch.candidate_timestamps.shape[0]
    return torch.repeat_interleave(values, batch.num_candidates, output_size=count)
