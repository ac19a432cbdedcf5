"""`LogLoss`: the mean binary cross-entropy of probabilities."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import PredictionMean


@register(pb.LogLoss)
class LogLoss(PredictionMean):
    """Mean of -y log p - (1 - y) log(1 - p), with p clipped to [eps, 1 - eps]."""

    name = "log_loss"
    higher_is_better = False

    def __init__(self, config: pb.LogLoss):
        super().__init__()
        self.eps = check_eps(config.eps)

    def values(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(predictions, labels, self.eps)


def cross_entropy(probabilities: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Maps probabilities and labels in [0, 1], float64 [N] each, to float64 [N]."""
    p = probabilities.clamp(eps, 1 - eps)
    return -labels * torch.log(p) - (1 - labels) * torch.log1p(-p)


def check_eps(eps: float) -> float:
    """Returns `eps` if it is valid.

    Raises:
        ValueError: `eps` is outside (0, 0.5).
    """
    if not 0 < eps < 0.5:
        raise ValueError(f"eps: {eps} is given; it must lie between 0 and 0.5")
    return eps
