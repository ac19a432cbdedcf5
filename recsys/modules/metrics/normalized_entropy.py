"""`NormalizedEntropy`: log loss relative to that of always predicting the base rate (He et al., 2014)."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import SumMetric, check_shapes, weighted_sum
from recsys.modules.metrics.log_loss import check_eps, cross_entropy


@register(pb.NormalizedEntropy)
class NormalizedEntropy(SumMetric):
    """Log loss / entropy of the share of positives: 1 for always predicting that share, 0 if perfect."""

    name = "normalized_entropy"
    higher_is_better = False

    def __init__(self, config: pb.NormalizedEntropy):
        super().__init__(("loss", "positives", "weight"))
        self.eps = check_eps(config.eps)

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds N candidates by [N] probabilities, labels 0 or 1, and weights; `groups` is not used."""
        check_shapes(predictions, labels, weights, groups)
        loss = cross_entropy(predictions.double(), labels.double(), self.eps)
        self.loss += weighted_sum(loss, weights)
        self.positives += weighted_sum(labels, weights)
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN unless both classes occur."""
        rate = self.positives / self.weight
        entropy = -torch.xlogy(rate, rate) - torch.xlogy(1 - rate, 1 - rate)
        return torch.where(entropy > 0, self.loss / self.weight / entropy, torch.nan)
