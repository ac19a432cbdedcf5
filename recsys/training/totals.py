"""Adds up the losses of a step: sums over this process's rows, and the loss that training minimizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recsys.models.base import Losses


@dataclass(frozen=True)
class Totals:
    """Losses of one process's rows.

    Attributes:
        names, weights: the tasks'.
        losses: sums of the tasks' losses, [tasks], to differentiate.
        sums: float64 [2 x tasks + 1]: sums and counts of the tasks' losses, and the number of rows without
            fillers.
        loss: the weighted sum of the tasks' mean losses, a scalar to differentiate; None until the sums over
            all processes are known.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    losses: Tensor
    sums: Tensor
    loss: Tensor | None = None


def add_up(losses: Losses, sample_weight: Tensor) -> Totals:
    """Returns the totals of a batch, whose rows have these weights, [B]; 0 marks a filler row."""
    sums = [losses.sums.detach().double(), losses.counts.detach().double()]
    sums.append((sample_weight > 0).sum().double()[None])
    return Totals(losses.names, losses.weights, losses.sums, torch.cat(sums))


class WeightedLoss:
    """Computes the loss of totals, and keeps the weights of the tasks on the device."""

    def __init__(self) -> None:
        self._weights = torch.empty(0)

    def __call__(self, totals: Totals, world_size: int = 1) -> Totals:
        """Returns the totals with their loss, given sums over all processes.

        The loss is scaled so that the mean of its gradients over processes is the gradient of the total loss.
        """
        tasks = len(totals.names)
        targets = totals.sums[tasks : 2 * tasks]
        weights = self._weights_on(totals.sums.device, totals.weights)
        scale = weights * world_size / torch.where(targets == 0, 1.0, targets)
        return replace(totals, loss=(totals.losses * scale.to(totals.losses.dtype)).sum())

    def _weights_on(self, device: torch.device, weights: Sequence[float]) -> Tensor:
        """Returns the weights as float64 [tasks] on the device, where they are kept for the next step."""
        if self._weights.device != device or len(self._weights) != len(weights):
            self._weights = on_device(weights, device)
        return self._weights


def on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Returns the numbers as float64 on a device. A copy to a GPU does not wait."""
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
