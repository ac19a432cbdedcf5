"""`FocalLoss`: focal loss from logits (arXiv 1708.02002)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.losses.base import RankingLoss, checked_share, smooth, widen
from recsys.ops import SequenceLayout


@register(pb.FocalLoss)
class FocalLoss(RankingLoss):
    """Computes -a (1 - p)^gamma log p, with p the probability of the true class and a its weight.

    The weight is alpha for positives and 1 - alpha for negatives, or 1 for both if alpha is absent. A
    smoothed label y counts as a positive of weight y and a negative of weight 1 - y.
    """

    kind = "binary"

    def __init__(self, config: pb.FocalLoss):
        super().__init__()
        if config.gamma < 0:
            raise ValueError(f"gamma: {config.gamma} is given; it must be at least 0")
        if config.HasField("alpha") and not 0 < config.alpha < 1:
            raise ValueError(f"alpha: {config.alpha} is given; it must lie between 0 and 1")
        self.gamma = config.gamma
        self.label_smoothing = checked_share("label_smoothing", config.label_smoothing)
        self.positive_weight = config.alpha if config.HasField("alpha") else 1.0
        self.negative_weight = 1 - config.alpha if config.HasField("alpha") else 1.0

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout | None = None) -> Tensor:
        logits = widen(logits)
        labels = smooth(labels.to(logits.dtype), self.label_smoothing)
        log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
        # The power is exp(gamma * log): its gradient stays finite where 1 - p rounds to 0 and gamma < 1.
        positive = -log_p * torch.exp(self.gamma * log_not_p)
        negative = -log_not_p * torch.exp(self.gamma * log_p)
        return self.positive_weight * labels * positive + self.negative_weight * (1 - labels) * negative

    def predict(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(widen(logits))
