"""`Auc`: the exact area under the ROC curve."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import AllRows
from recsys.modules.metrics.pairs import auc_by_group


@register(pb.Auc)
class Auc(AllRows):
    """The probability that a positive is predicted above a negative, over all rows; ties count half."""

    name = "auc"
    higher_is_better = True

    def __init__(self, config: pb.Auc):
        super().__init__()

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN unless both classes occur."""
        predictions = self.rows("predictions")
        one_group = torch.zeros_like(predictions, dtype=torch.int64)
        auc = auc_by_group(predictions, self.rows("labels"), self.rows("weights"), one_group).auc
        return auc[0] if len(auc) else auc.new_tensor(torch.nan)
