"""Area under the ROC curve, exact."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import AllRows
from recsys.modules.metrics.pairs import auc_by_group


@register(pb.Auc)
class Auc(AllRows):
    """Probability that a positive is predicted above a negative, over all rows and ranks; ties count half."""

    name = "auc"
    higher_is_better = True

    def __init__(self, config: pb.Auc):
        super().__init__()

    def compute(self) -> Tensor:
        """Scalar float64; NaN unless both classes are there."""
        predictions = self.rows("predictions")
        one_group = torch.zeros_like(predictions, dtype=torch.int64)
        auc = auc_by_group(predictions, self.rows("labels"), self.rows("weights"), one_group).auc
        return auc[0] if len(auc) else auc.new_tensor(torch.nan)
