"""Runs the steps of a process that sends no ids to others: forward, backward, update, and the next batch."""

from collections.abc import Iterator

import torch
from torch import nn

from recsys.data.batch import Batch
from recsys.training.optimizers import ScheduledOptimizer
from recsys.training.train_step import PendingResult


class StepPipeline:
    """Trains on one batch after the other, with the calls of TorchRec's pipelines.

    The host reads a batch as soon as it has launched the step before, so that it waits for the reader while
    the device computes. (`TrainPipelineBase` reads it first, and copies it in a stream of its own: in a small
    model that costs the host more time than the copy costs the device.)

    Args:
        model: batch in, (loss to differentiate, result) out; on the device.
        optimizer: updates its weights.
        device: where batches go.
    """

    def __init__(self, model: nn.Module, optimizer: ScheduledOptimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._batch: Batch | None = None

    def reset(self) -> None:
        """Forgets the batch that was read ahead; call it before batches come from another iterator."""
        self._batch = None

    def progress(self, batches: Iterator[Batch]) -> PendingResult:
        """Trains on the next batch and returns its result.

        Raises:
            StopIteration: there is no further batch.
        """
        batch = next(batches) if self._batch is None else self._batch
        self._optimizer.zero_grad()
        loss, result = self._model(batch.to(self._device, non_blocking=True))
        loss.backward()
        self._optimizer.step()
        self._batch = next(batches, None)
        return result
