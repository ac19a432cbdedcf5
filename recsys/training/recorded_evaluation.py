"""Computes losses and metric rows of an evaluation; in small models by replaying recorded CUDA graphs.

An evaluation during training runs like its steps, see `recorded_step`: batches in padded inputs, and for each
of their few sizes one graph of the forward pass, the objective and `metric_rows`. Fillers lie behind a batch,
so that its results are the first ones. Weights change in place, also where their average takes their place,
so replays see them. Every batch encodes the items that it is compared with; without graphs, batches share
them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models.base import Losses, MetricRows, Model
from recsys.training import recorded_step
from recsys.training.cuda_graphs import ForwardGraph, GraphMemory
from recsys.training.recorded_step import BatchRecorder, most_entries, no_waiting, obstacle


@dataclass(frozen=True)
class BatchResults:
    """The results of a batch: its losses, and an entry of the metrics' arguments for each candidate."""

    losses: Losses
    rows: MetricRows

    @classmethod
    def of(cls, model: Model, outputs: Any, batch: Batch) -> "BatchResults":
        """Computes them from the model's outputs for the batch."""
        return cls(model.objective(outputs, batch), model.metric_rows(outputs, batch))

    def first(self, count: int) -> "BatchResults":
        """Returns copies, with the rows of the first candidates only."""
        losses = replace(self.losses, sums=self.losses.sums.clone(), counts=self.losses.counts.clone())
        rows = {task: tuple(x[:count].clone() for x in columns) for task, columns in self.rows.items()}
        return BatchResults(losses, rows)


class EvaluationRecorder(BatchRecorder[BatchResults, ForwardGraph[BatchResults]]):
    """Records the graphs of evaluations, and replays them. The model must be in evaluation mode."""

    subject, evaluates = "evaluation is", True

    @torch.no_grad()
    def results(self, batch: Batch) -> BatchResults:
        """Computes the results of a batch that is on the host, without fillers."""
        return self._result(batch).first(batch.candidate_timestamps.shape[0])

    def _compute(self, vectors: dict[str, Tensor], batch: Batch) -> BatchResults:
        with self._model.embed.given(vectors) if vectors else nullcontext():
            return BatchResults.of(self._model, self._model(batch), batch)

    def _record(self, compute: Callable[[], BatchResults], rows: Sequence[Tensor]) -> ForwardGraph:
        with no_waiting():
            compute()
        return ForwardGraph(compute, rows, self.memory.pool)


def evaluation_recorder_for(
    model: Model,
    pipeline: pb.Pipeline,
    device: torch.device,
    world_size: int,
    memory: GraphMemory | None = None,
) -> EvaluationRecorder | None:
    """Returns the recorder of evaluations; None if they are not recorded. Logs why, if users may wonder."""
    if device.type != "cuda" or not pipeline.train.cuda_graphs:
        return None
    if most_entries(pipeline, pipeline.data.eval_batch_size) > recorded_step.MOST_ENTRIES:
        return None
    reason = obstacle(model, pipeline, world_size)
    if not reason and model.evaluation_waits:
        reason = "the host reads numbers of this model from the GPU"
    if reason:
        recorded_step.log.info("evaluation is not recorded as CUDA graphs: %s", reason)
        return None
    return EvaluationRecorder(model, pipeline, memory=memory)
