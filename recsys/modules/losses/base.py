"""`RankingLoss`: computes the loss of a candidate, and the prediction that its logits stand for."""

from typing import Literal

import torch
from torch import Tensor, nn

from recsys.ops import SequenceLayout

Kind = Literal["binary", "regression", "retrieval"]


class RankingLoss(nn.Module):
    """Base class of losses per candidate. They are not reduced, since the model sums over ranks first.

    Attributes:
        kind: "binary" (labels 0 or 1, predictions are probabilities) or "regression" (predictions are in the
            label's unit).
        num_logits: number of logits per candidate.
        compares: whether the loss compares candidates of a row with each other.
    """

    kind: Kind
    num_logits: int = 1
    compares: bool = False

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout | None = None) -> Tensor:
        """Computes the loss of each candidate.

        Args:
            logits: [N] of any float dtype; [N, num_logits] if num_logits is more than 1.
            labels: [N].
            rows: the candidates of each row: a layout of N tokens, all targets. Only a loss that `compares`
                needs it.

        Returns:
            [N] float32 (float64 for float64 logits).
        """
        raise NotImplementedError

    def predict(self, logits: Tensor) -> Tensor:
        """Maps logits as in `forward` to predictions, [N] float32 (float64 for float64 logits)."""
        raise NotImplementedError


def widen(x: Tensor) -> Tensor:
    """Casts to at least float32: losses are never computed in bfloat16, and float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def smooth(labels: Tensor, share: float) -> Tensor:
    """Spreads a share of each label evenly over both classes: 0 becomes share / 2, 1 becomes 1 - share / 2.

    Source: arXiv 1512.00567, section 7, with two classes.
    """
    return labels * (1 - share) + share / 2 if share else labels


def checked_share(name: str, value: float) -> float:
    """Returns `value`, the setting `name`, if it is a share.

    Raises:
        ValueError: the value is not between 0 and 1.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {value} is given; it must be from 0 to 1")
    return value
