"""What a ranking loss offers to a model: the loss of a candidate, and the prediction that a logit means."""

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["binary", "regression", "retrieval"]


class RankingLoss(nn.Module):
    """A loss over candidates, not reduced: the model sums over ranks before it divides.

    Attributes:
        kind: "binary" (labels 0 or 1, predictions are probabilities) or "regression" (predictions are in the
            label's unit).
    """

    kind: Kind

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each candidate.

        Args:
            logits: [N] of any float type.
            labels: [N].

        Returns:
            [N] float32 (float64 for float64 logits).
        """
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        """[N] logits -> [N] predictions, float32 (float64 for float64 logits)."""
        raise NotImplementedError


def widen(x: Tensor) -> Tensor:
    """At least float32: losses are never taken in bfloat16, and float64 stays what it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
