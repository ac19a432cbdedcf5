"""`Gauc`: AUC within each user, which measures the order of the list that a user saw."""

from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import AllRows
from recsys.modules.metrics.pairs import auc_by_group


@register(pb.Gauc)
class Gauc(AllRows):
    """Mean AUC of the groups with both classes, each weighted by its number of candidates."""

    name = "gauc"
    higher_is_better = True

    def __init__(self, config: pb.Gauc):
        super().__init__()

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN unless some group has both classes."""
        columns = (self.rows(key) for key in ("predictions", "labels", "weights", "groups"))
        by_group = auc_by_group(*columns)
        weight = by_group.weight[by_group.defined]
        return (by_group.auc[by_group.defined] * weight).sum() / weight.sum()
