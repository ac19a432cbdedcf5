"""`Reliability`: mean prediction and share of positives in each bin, for a diagram in the report."""

from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from recsys.modules.metrics.base import check_shapes, several_processes

NUM_BINS = 10
"""Number of bins of the diagram."""

_STEP = 0.002
"""Width of a cell in log odds. The odds of predictions in a cell differ by at most 0.2 %."""

_CELLS = 15_000
"""Number of cells, for log odds from -15 to 15 (probabilities 3e-7 to 1 - 3e-7) and beyond at the ends."""


class ReliabilityBin(NamedTuple):
    """Candidates with similar predictions.

    Attributes:
        candidates: number of candidates.
        predicted: mean prediction.
        observed: share of positives.
    """

    candidates: int
    predicted: float
    observed: float


class Reliability(Metric):
    """Divides candidates, ordered by prediction, into bins of about equal weight.

    It does not store candidates, but sums over narrow cells of log odds and merges cells into bins at the
    end. A cell, within which predictions hardly differ, is never split, so some bins may be larger than
    others, and some empty.

    Args:
        num_bins: the largest number of bins.
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor

    def __init__(self, num_bins: int = NUM_BINS):
        super().__init__(compute_with_cache=False, distributed_available_fn=several_processes)
        self.num_bins = num_bins
        # Per cell: the number of candidates, and the sums of weights, weighted predictions and weighted
        # labels.
        self.add_state("sums", torch.zeros(4, _CELLS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds N candidates, all arguments [N]: probabilities, labels 0 or 1, weights; `groups` is not used.

        A NaN prediction makes the first bin NaN, so that it is noticed.
        """
        check_shapes(predictions, labels, weights, groups)
        predictions, labels, weights = predictions.double(), labels.double(), weights.double()
        cell = torch.logit(predictions) / _STEP + _CELLS / 2
        cell = cell.clamp(0, _CELLS - 1).nan_to_num(0.0).to(torch.int64)
        columns = torch.stack([torch.ones_like(weights), weights, weights * predictions, weights * labels])
        self.sums.index_add_(1, cell, torch.where(weights > 0, columns, 0))

    def compute(self) -> Tensor:
        """Returns the sums of each bin, by rising prediction, float64 [num_bins, 4]; zeros for empty bins."""
        weight = self.sums[1]
        middle = (weight.cumsum(0) - weight / 2) / weight.sum()
        number = (middle * self.num_bins).nan_to_num(0.0).to(torch.int64).clamp(0, self.num_bins - 1)
        return self.sums.new_zeros(4, self.num_bins).index_add(1, number, self.sums).T

    def bins(self) -> list[ReliabilityBin]:
        """Returns the bins with candidates, by rising prediction. Collective, like `compute`."""
        return [
            ReliabilityBin(round(candidates), predicted / weight, observed / weight)
            for candidates, weight, predicted, observed in self.compute().tolist()
            if candidates
        ]
