"""Computes one loss from one batch, the same on any number of ranks.

`TrainStep` is what TorchRec's pipeline traces and runs: model, objective, and a single sum over ranks that
carries the losses of all tasks, the counts for the log, and whether a rank was asked to stop. A loss that is
not finite stops every rank here, before the backward pass, in which sharded tables are already updated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.data.batch import Batch, Position
from recsys.data.counts import Counts
from recsys.errors import NonFiniteLossError
from recsys.models.base import Losses, Model
from recsys.training.signals import HANDLED


@dataclass(frozen=True)
class StepResult:
    """Results of one step over the batches of all ranks; the same on all ranks.

    Attributes:
        losses: by task, the mean over targets of all ranks.
        loss: their weighted sum, which is minimised.
        samples: rows, fillers left out. tokens: tokens of the sequences.
        flop: FLOP that forward and backward pass need.
        signals: by number of the signal, how often the ranks got it.
        position: the last of them in the plan.
        history_lengths: int64 [B] on the host, of this rank's rows only.
        counts: rows left out or cut.
    """

    losses: dict[str, float]
    loss: float
    samples: int
    tokens: int
    flop: float
    signals: dict[int, int]
    position: Position
    history_lengths: Tensor
    counts: Counts


class TrainStep(nn.Module):
    """Model and objective as one module: batch in, (loss to differentiate, StepResult) out."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.sum_over_ranks = SumOverRanks(model.flops)

    def forward(self, batch: Batch) -> tuple[Tensor, StepResult]:
        """Raises NonFiniteLossError on all ranks when the loss of one is not finite."""
        outputs = self.model(batch)
        losses = self.model.objective(outputs, batch)
        return self.sum_over_ranks(losses, batch)


class SumOverRanks(nn.Module):
    """The only collective of a step. It is a separate module because the pipeline traces the code around it.

    Args:
        count_flops: of a forward pass; `Model.flops`.

    Attributes:
        received: by number, how often this process got a signal of `signals.HANDLED`.
    """

    def __init__(self, count_flops: Callable[[Batch], int]) -> None:
        super().__init__()
        self.count_flops = count_flops
        self.received = dict.fromkeys((int(number) for number in HANDLED), 0)

    def forward(self, losses: Losses, batch: Batch) -> tuple[Tensor, StepResult]:
        """This rank's loss, scaled so that the mean of its gradients over ranks is the gradient of the total
        loss.
        """
        # The backward pass has two products for each one of the forward pass: a gradient for either factor.
        flop = 3 * self.count_flops(batch)
        counts = batch.rows.counts if batch.rows else Counts()
        numbers = [batch.sequences.total_len, flop, *counts, *self.received.values()]
        packed = torch.cat(
            [
                losses.sums.detach().double(),
                losses.counts.detach().double(),
                (batch.sample_weight > 0).sum().double()[None],
                torch.tensor(numbers, dtype=torch.float64).to(losses.sums.device, non_blocking=True),
            ]
        )
        world_size = dist.get_world_size()
        if world_size > 1:
            dist.all_reduce(packed)
        tasks = len(losses.names)
        packed = packed.tolist()
        sums, targets = packed[:tasks], packed[tasks : 2 * tasks]
        samples, tokens, flop, *others = packed[2 * tasks :]
        means = {n: s / (c or 1.0) for n, s, c in zip(losses.names, sums, targets, strict=True)}
        _require_finite(means)
        scale = torch.tensor(
            [w * world_size / (c or 1.0) for w, c in zip(losses.weights, targets, strict=True)],
            dtype=losses.sums.dtype,
        ).to(losses.sums.device, non_blocking=True)
        result = StepResult(
            losses=means,
            loss=sum(w * means[n] for n, w in zip(losses.names, losses.weights, strict=True)),
            samples=int(samples),
            tokens=int(tokens),
            flop=flop,
            signals=dict(zip(self.received, map(int, others[len(counts) :]), strict=True)),
            position=batch.position,
            history_lengths=batch.layout.on_host().num_uih,
            counts=Counts(*map(int, others[: len(counts)])),
        )
        return (losses.sums * scale).sum(), result


def _require_finite(means: dict[str, float]) -> None:
    broken = {name: value for name, value in means.items() if not math.isfinite(value)}
    if broken:
        raise NonFiniteLossError(", ".join(f"the loss of task {n} is {v}" for n, v in broken.items()))
