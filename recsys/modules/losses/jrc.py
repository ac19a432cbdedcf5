"""`JrcLoss`: joint optimization of ranking and calibration, by softmaxes over classes and over candidates.

Source: arXiv 2208.06164; the paper calls a row a context.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.losses.base import RankingLoss, checked_share, widen
from recsys.ops import SequenceLayout, segment_sum


@register(pb.JrcLoss)
class JrcLoss(RankingLoss):
    """Computes s * -log p(y | z) + (1 - s) * -log p(candidate | y, rivals), with s the pointwise share.

    p(y | z) is the softmax of a candidate's two logits, taken at its class y. p(candidate | y, rivals) is the
    softmax of the class-y logits of the candidate and its rivals in the row, taken at the candidate. Without
    rivals the second term is 0.
    """

    kind = "binary"
    num_logits = 2
    compares = True

    def __init__(self, config: pb.JrcLoss):
        super().__init__()
        self.pointwise_share = checked_share("pointwise_share", config.pointwise_share)
        if config.rivals not in (pb.JrcLoss.OTHER_CLASS, pb.JrcLoss.WHOLE_ROW):
            raise ValueError(f"rivals: {config.rivals} is given; it must be OTHER_CLASS or WHOLE_ROW")
        self.whole_row = config.rivals == pb.JrcLoss.WHOLE_ROW

    def forward(self, logits: Tensor, labels: Tensor, rows: SequenceLayout) -> Tensor:
        logits = widen(logits)
        is_class = torch.stack([labels <= 0.5, labels > 0.5], 1)
        by_class = -F.log_softmax(logits, 1)
        by_row = self._against_row(logits, is_class, rows)
        mixed = self.pointwise_share * by_class + (1 - self.pointwise_share) * by_row
        return (mixed * is_class).sum(1)

    def predict(self, logits: Tensor) -> Tensor:
        logits = widen(logits)
        return torch.sigmoid(logits[:, 1] - logits[:, 0])

    def _against_row(self, logits: Tensor, is_class: Tensor, rows: SequenceLayout) -> Tensor:
        """Returns -log p(candidate | class, rivals), [N, 2]; the caller reads only the candidate's class."""
        if self.whole_row:
            return logsumexp_of_rows(logits, torch.ones_like(is_class), rows) - logits
        # For a column's class, the rivals are the candidates of the other class.
        rivals = logsumexp_of_rows(logits, ~is_class, rows)
        alone = rivals == -torch.inf
        return -F.logsigmoid(logits - rivals.masked_fill(alone, 0)).masked_fill(alone, 0)


def logsumexp_of_rows(values: Tensor, counted: Tensor, rows: SequenceLayout) -> Tensor:
    """Computes, for each candidate, the log of the sum of exp over the counted candidates of its row.

    Args:
        values: [N, K] floating point.
        counted: bool [N, K].
        rows: a layout of N tokens.

    Returns:
        [N, K], -inf where no candidate of the row counts; gradients are not NaN there.
    """
    row = rows.sample_ids()
    values = values.masked_fill(~counted, -torch.inf)
    top = values.new_full((rows.batch_size, values.shape[1]), -torch.inf)
    # The result does not depend on the subtracted maximum, so no gradient flows through it.
    top = top.scatter_reduce(0, row[:, None].expand_as(values), values.detach(), "amax")
    nothing = top == -torch.inf
    top = top.masked_fill(nothing, 0)
    total = segment_sum((values - top.index_select(0, row)).exp(), rows.lengths)
    sums = total.masked_fill(nothing, 1).log() + top
    return sums.masked_fill(nothing, -torch.inf).index_select(0, row)
