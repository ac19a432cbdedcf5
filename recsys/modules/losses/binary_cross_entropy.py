"""`BinaryCrossEntropy`: binary cross-entropy from logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.losses.base import RankingLoss, checked_share, smooth, widen
from recsys.ops import SequenceLayout

LINEAR = 40
"""Above this x, log(1 + exp(x)) rounds to x, even in float64."""


@register(pb.BinaryCrossEntropy)
class BinaryCrossEntropy(RankingLoss):
    """Computes -w y log p - (1 - y) log(1 - p) with p = sigmoid(logit).

    Here w is the positive weight and y the label, smoothed if the config says so.
    """

    kind = "binary"

    def __init__(self, config: pb.BinaryCrossEntropy):
        super().__init__()
        if not config.positive_weight > 0:
            raise ValueError(f"positive_weight: {config.positive_weight} is given; it must be above 0")
        self.positive_weight = config.positive_weight
        self.label_smoothing = checked_share("label_smoothing", config.label_smoothing)

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout | None = None) -> Tensor:
        logits = widen(logits)
        # Compute from logits, never from p: log(1 - p) is -inf as soon as p rounds to 1. Use few operations:
        # with only hundreds of candidates, launching them dominates the time.
        positive, negative = F.softplus(-logits, threshold=LINEAR), F.softplus(logits, threshold=LINEAR)
        if self.positive_weight != 1:
            positive = self.positive_weight * positive
        return torch.lerp(negative, positive, smooth(labels.to(logits.dtype), self.label_smoothing))

    def predict(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(widen(logits))
