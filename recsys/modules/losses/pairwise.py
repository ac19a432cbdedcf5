"""`PairwiseLoss`: logistic loss over pairs of candidates of a row, added to a pointwise loss.

Source: RankNet (Burges et al., ICML 2005) for the pairs; the sum with a pointwise loss on the same logit is
"combined pair" (Li et al., KDD 2015).
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recsys import protos as pb
from recsys.config.registry import pick, register
from recsys.modules.losses.base import RankingLoss, checked_share, widen
from recsys.ops import SequenceLayout, gather_rows

BLOCK_PAIRS = {"cpu": 2**20, "cuda": 2**25}
"""Number of pairs in memory at once, by device type. The backward pass computes them again."""


@register(pb.PairwiseLoss)
class PairwiseLoss(RankingLoss):
    """Computes s * pointwise loss + (1 - s) * mean of log(1 + exp(-d)) over the candidate's pairs.

    A candidate forms pairs with the candidates of its row that have a different label; d is the logit of the
    larger label minus that of the smaller, and s the pointwise share. With two labels, the second term summed
    over a row is the row's mean over pairs times its number of candidates.
    """

    kind = "binary"
    compares = True

    def __init__(self, config: pb.PairwiseLoss):
        super().__init__()
        self.pointwise_share = checked_share("pointwise_share", config.pointwise_share)
        complete = pb.PairwiseLoss()
        complete.CopyFrom(config)
        if complete.WhichOneof("pointwise") is None:
            complete.binary_cross_entropy.SetInParent()
        pointwise = pick(complete)
        self.pointwise = pointwise.cls(pointwise.config)
        self.kind = self.pointwise.kind

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout) -> Tensor:
        points = self.pointwise(logits, labels, rows)
        pairs = pair_losses(widen(logits), labels, rows)
        return self.pointwise_share * points + (1 - self.pointwise_share) * pairs

    def predict(self, logits: Tensor) -> Tensor:
        return self.pointwise.predict(logits)


def pair_losses(logits: Tensor, labels: Tensor, rows: SequenceLayout) -> Tensor:
    """Computes the mean loss of each candidate's pairs, [N]; 0 for a candidate without pairs."""
    padded, row = rows.padded_index(), rows.sample_ids()
    shape, inverse = padded.index.shape, row * rows.max_len + rows.positions()
    # [B, longest row]; the label NaN, which no candidate has, marks padding.
    other_logits = gather_rows(logits, padded.index.flatten(), inverse).view(shape)
    other_labels = gather_rows(labels, padded.index.flatten(), inverse).view(shape)
    other_labels = torch.where(padded.valid, other_labels, torch.nan)
    size = max(1, BLOCK_PAIRS.get(logits.device.type, BLOCK_PAIRS["cuda"]) // max(1, rows.max_len))
    if len(logits) <= size:
        return _means(logits, labels, row, other_logits, other_labels)
    means = []
    for start in range(0, len(logits), size):
        block = slice(start, start + size)
        inputs = (logits[block], labels[block], row[block], other_logits, other_labels)
        means.append(checkpoint(_means, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(means)


def _means(logits: Tensor, labels: Tensor, row: Tensor, other_logits: Tensor, other_labels: Tensor) -> Tensor:
    """Returns the mean losses of n candidates against all rows, [B, longest row], padded with NaN labels."""
    difference = labels[:, None] - other_labels.index_select(0, row)
    sign = torch.nan_to_num(difference).sign().to(logits.dtype)
    losses = -F.logsigmoid(sign * (logits[:, None] - other_logits.index_select(0, row)))
    pairs = sign.abs()
    return (losses * pairs).sum(1) / pairs.sum(1).clamp(min=1)
