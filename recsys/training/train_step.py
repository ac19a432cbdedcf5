"""Computes one loss from one batch, the same on any number of ranks.

`TrainStep` is what TorchRec's pipeline traces and runs: model, objective, and a single sum over ranks that
carries the losses of all tasks, the counts for the log, and whether a rank was asked to stop. Nothing here
waits for the device: the numbers follow the step to the host as a `PendingResult`, which checks there that
the losses are finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.data.batch import Batch
from recsys.data.counts import Counts
from recsys.errors import NonFiniteLossError
from recsys.models.base import Model
from recsys.training.recorded_step import Recorder, TotalsOfVectors
from recsys.training.signals import HANDLED, WRITE_FAILED
from recsys.training.totals import Totals, WeightedLoss, on_device


@dataclass(frozen=True)
class StepResult:
    """Results of one step over the batches of all ranks; the same on all ranks.

    Attributes:
        losses: mean loss over the targets of all ranks, by task.
        loss: weighted sum of `losses`, which training minimizes.
        samples: number of rows without filler rows.
        tokens: number of tokens of the sequences.
        flop: FLOP of forward and backward pass.
        signals: how often the ranks received each signal, by number of the signal or `signals.WRITE_FAILED`.
        counts: rows left out or cut.
    """

    losses: dict[str, float]
    loss: float
    samples: int
    tokens: int
    flop: float
    signals: dict[int, int]
    counts: Counts


class PendingResult:
    """The result of a step that the device may still be computing.

    Args:
        totals: the tasks' names and weights.
        sums: float64 on the device: sums and counts of all tasks, the number of rows, and `numbers` if they
            had to be summed over ranks.
        numbers: the numbers that follow `sums`; empty if `sums` contains them.
        signals: the signals that are counted.

    Attributes:
        position: position in the plan of the last batch of any rank.
        history_lengths: history lengths of this rank's rows, int64 [B] on the host.
    """

    def __init__(
        self, totals: Totals, sums: Tensor, numbers: list[float], signals: list[int], batch: Batch
    ) -> None:
        self._names, self._weights = totals.names, totals.weights
        self._numbers, self._signals = numbers, signals
        self._sums = sums.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if sums.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.position = batch.position
        self.history_lengths = _history_lengths(batch)

    def wait(self) -> StepResult:
        """Returns the result as soon as the device has computed it.

        Raises:
            NonFiniteLossError: the loss of some task is not finite, on all ranks alike. The step has already
                changed the weights, so they must not be used.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values, tasks = self._sums.tolist() + self._numbers, len(self._names)
        sums, targets = values[:tasks], values[tasks : 2 * tasks]
        samples, tokens, flop, *counters = values[2 * tasks :]
        means = {n: s / (c or 1.0) for n, s, c in zip(self._names, sums, targets, strict=True)}
        _require_finite(means)
        first_signal = len(counters) - len(self._signals)
        return StepResult(
            losses=means,
            loss=sum(w * means[n] for n, w in zip(self._names, self._weights, strict=True)),
            samples=int(samples),
            tokens=int(tokens),
            flop=flop,
            signals=dict(zip(self._signals, map(int, counters[first_signal:]), strict=True)),
            counts=Counts(*map(int, counters[:first_signal])),
        )


class TrainStep(nn.Module):
    """Model and objective as one module: batch in, (loss to differentiate, PendingResult) out.

    TorchRec's pipeline traces this forward pass. Only the lookup of embeddings has modules that it looks
    into; a model may compute whatever it likes with the vectors.

    Attributes:
        totals_of_vectors: computes the losses of looked-up vectors.
        recorder: replays graphs in training instead; None computes every batch as it is.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.totals_of_vectors = TotalsOfVectors(model)
        self.recorder: Recorder | None = None
        self.sum_over_ranks = SumOverRanks(model.flops)

    def forward(self, batch: Batch) -> tuple[Tensor, PendingResult]:
        """Runs the model on a batch of any size."""
        if self.training and self.recorder is not None:
            return self.sum_over_ranks(self.recorder.totals(batch), batch)
        looked_up = self.model.embed.look_up(batch.ids)
        return self.sum_over_ranks(self.totals_of_vectors(looked_up, batch), batch)


class SumOverRanks(nn.Module):
    """The only collective of a step. It is a separate module because the pipeline traces the code around it.

    Args:
        count_flops: counts the FLOP of a forward pass; `Model.flops`.

    Attributes:
        received: how often this process received each signal of `signals.HANDLED`, by number; and under
            `signals.WRITE_FAILED`, 1 if a checkpoint could not be written.
    """

    def __init__(self, count_flops: Callable[[Batch], int]) -> None:
        super().__init__()
        self.count_flops = count_flops
        self.received = dict.fromkeys((*(int(number) for number in HANDLED), WRITE_FAILED), 0)
        self._weigh = WeightedLoss()

    def forward(self, totals: Totals, batch: Batch) -> tuple[Tensor, PendingResult]:
        """Returns the loss of this rank, as `WeightedLoss` scales it, and the pending result of the step."""
        # For each product, the backward pass computes two: the gradient of either factor.
        flop = 3 * self.count_flops(batch)
        counts = batch.rows.counts if batch.rows else Counts()
        numbers = [float(n) for n in (batch.sequences.total_len, flop, *counts, *self.received.values())]
        sums, world_size = totals.sums, dist.get_world_size()
        if world_size > 1:
            count = len(sums)
            sums = torch.cat([sums, on_device(numbers, sums.device)])
            dist.all_reduce(sums)
            totals, numbers = replace(totals, sums=sums[:count]), []
        if totals.loss is None:
            totals = self._weigh(totals, world_size)
        return totals.loss, PendingResult(totals, sums, numbers, list(self.received), batch)


def _history_lengths(batch: Batch) -> Tensor:
    host = batch.layout.host_copy
    if host is None:
        raise ValueError(f"the lengths are on {batch.layout.device} only; take a layout built on the host")
    return host.lengths - host.num_targets - batch.layout.num_contextual


def _require_finite(means: dict[str, float]) -> None:
    broken = {name: value for name, value in means.items() if not math.isfinite(value)}
    if broken:
        raise NonFiniteLossError(", ".join(f"the loss of task {n} is {v}" for n, v in broken.items()))
