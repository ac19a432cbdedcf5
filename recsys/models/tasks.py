"""Computes predictions, losses and metrics of tasks for candidates, for every model with `Task`s."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from recsys import protos as pb
from recsys.config import features
from recsys.config.registry import pick
from recsys.data.batch import Batch
from recsys.models.base import Losses, MetricRows
from recsys.modules.losses import RankingLoss
from recsys.ops import Selection, SequenceLayout, offsets_from_lengths


@dataclass(frozen=True, eq=False)
class TaskOutputs:
    """The outputs for N candidates.

    Attributes:
        logits: float32 [N, L], the logits of all tasks side by side, as many per task as its loss needs.
        predictions: for each task, float32 [N]: probabilities, or values in the label's unit.
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
    """The objective of a model with tasks: each task's loss, summed over candidates by their weights.

    A candidate's weight is that of its row (0 in a filler row) times its entry in the task's `weight_column`,
    or 0 where the label of the task's `given_task` is not 1.
    """

    def __init__(self, tasks: Sequence[pb.Task]):
        super().__init__()
        self.names = tuple(task.name for task in tasks)
        self.weights = tuple(task.weight for task in tasks)
        self.columns = tuple((task.weight_column, task.given_task) for task in tasks)
        chosen = [pick(task.loss) for task in tasks]
        self.losses = nn.ModuleList(loss.cls(loss.config) for loss in chosen)

    def forward(self, outputs: TaskOutputs, batch: Batch) -> Losses:
        """Returns sums and counts over the candidates of this rank."""
        row_weights = per_candidate(batch.sample_weight, batch)
        # Tasks with the same columns share their weights.
        weights = {
            columns: _weighted(row_weights, *columns, batch) for columns in dict.fromkeys(self.columns)
        }
        counts = {columns: weight.sum() for columns, weight in weights.items()}
        compares = any(loss.compares for loss in self.losses)
        rows = batch.layout.targets_only().layout if compares else None
        sums = []
        for name, loss, columns, logits in zip(
            self.names, self.losses, self.columns, by_task(outputs.logits, self.losses), strict=True
        ):
            inputs, weight = (logits, batch.labels[name]), weights[columns]
            if loss.compares and columns[1]:
                compared, order = apart(rows, batch.labels[columns[1]] > 0.5)
                inputs, weight = tuple(x[order] for x in inputs), weight[order]
                sums.append((loss(*inputs, compared) * weight).sum())
            else:
                sums.append((loss(*inputs, rows) * weight).sum())
        return Losses(
            self.names,
            torch.stack(sums),
            torch.stack([counts[columns] for columns in self.columns]),
            self.weights,
        )

    @property
    def probabilities(self) -> tuple[str, ...]:
        """The names of the tasks with a binary loss, whose predictions are probabilities."""
        losses = zip(self.names, self.losses, strict=True)
        return tuple(name for name, loss in losses if loss.kind == "binary")


class TaskPredictions(nn.Module):
    """Converts the head's logits to each task's predictions, as the task's loss defines them, in float32."""

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


def task_rows(outputs: TaskOutputs, batch: Batch, tasks: Iterable[pb.Task]) -> MetricRows:
    """Returns predictions, labels, weights and groups of the candidates, for each task.

    A candidate's weight is that of its row, or 0 where the label of the task's `given_task` is not 1. The
    `weight_column` of losses does not affect metrics.
    """
    weights = per_candidate(batch.sample_weight, batch)
    groups = per_candidate(batch.group, batch)
    return {
        task.name: (
            outputs.predictions[task.name],
            batch.labels[task.name],
            _weighted(weights, "", task.given_task, batch),
            groups,
        )
        for task in tasks
    }


def apart(rows: SequenceLayout, counted: Tensor) -> Selection:
    """Splits every row in two, so that losses compare counted candidates only with counted candidates.

    Args:
        rows: a layout of N candidates in B rows.
        counted: bool [N], whether each candidate counts.

    Returns:
        A layout of 2 B rows, first the counted candidates of each row, then the other candidates of each row,
        and for each of its N positions the index of its candidate. Nothing waits for the device.
    """
    place = rows.sample_ids() + rows.batch_size * ~counted
    lengths = rows.lengths.new_zeros(2 * rows.batch_size).index_add(0, place, torch.ones_like(place))
    layout = SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        num_targets=lengths,
        num_contextual=0,
        total_len=rows.total_len,
        max_len=rows.max_len,
        total_targets=rows.total_len,
    )
    return Selection(layout, place.argsort(stable=True))


def _weighted(weights: Tensor, column: str, given_task: str, batch: Batch) -> Tensor:
    """Multiplies candidates' weights [N] by a column and by the labels of a task, if these are named."""
    if column:
        values = batch.weights[column]
        weights = weights * (per_candidate(values, batch) if features.side_of(column) == pb.USER else values)
    return weights * (batch.labels[given_task] > 0.5) if given_task else weights


def by_task(logits: Tensor, losses: Iterable[RankingLoss]) -> list[Tensor]:
    """Splits [N, L] into the logits of each loss: [N], or [N, num_logits] if num_logits is more than 1."""
    parts = logits.split([loss.num_logits for loss in losses], dim=1)
    return [part.squeeze(1) if part.shape[1] == 1 else part for part in parts]


def per_candidate(values: Tensor, batch: Batch) -> Tensor:
    """Repeats the value of each row, [B], for each of its candidates; returns [N]."""
    count = batch.candidate_timestamps.shape[0]
    return torch.repeat_interleave(values, batch.num_candidates, output_size=count)
