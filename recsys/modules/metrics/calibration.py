"""`Calibration`: the ratio of predictions to labels, which is 1 if predictions are right on average."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import SumMetric, check_shapes, weighted_sum


@register(pb.Calibration)
class Calibration(SumMetric):
    """Sum of predictions / sum of labels. The best value is 1; above it, predictions are too high."""

    name = "calibration"

    def __init__(self, config: pb.Calibration):
        super().__init__(("predicted", "observed"))

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds N candidates; all arguments are [N], and `groups` is not used."""
        check_shapes(predictions, labels, weights, groups)
        self.predicted += weighted_sum(predictions, weights)
        self.observed += weighted_sum(labels, weights)

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN if the labels sum to 0."""
        return torch.where(self.observed != 0, self.predicted / self.observed, torch.nan)
