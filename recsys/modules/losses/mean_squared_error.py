"""`MeanSquaredError`: squared error of a regression on the label or on its logarithm."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.losses.base import RankingLoss, widen
from recsys.ops import SequenceLayout


@register(pb.MeanSquaredError)
class MeanSquaredError(RankingLoss):
    """Computes (logit - f(label))^2, where f is the identity, or log(1 + label) for labels of at least 0."""

    kind = "regression"

    def __init__(self, config: pb.MeanSquaredError):
        super().__init__()
        self.log1p = config.log1p

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout | None = None) -> Tensor:
        logits = widen(logits)
        labels = labels.to(logits.dtype)
        return (logits - (torch.log1p(labels) if self.log1p else labels)).square()

    def predict(self, logits: Tensor) -> Tensor:
        """Returns the label that corresponds to the logit; with log1p, at least 0 like every label."""
        logits = widen(logits)
        return torch.expm1(logits).clamp(min=0) if self.log1p else logits
