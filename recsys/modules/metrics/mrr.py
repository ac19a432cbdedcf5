"""`Mrr`: the mean reciprocal rank."""

from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import RankMean


@register(pb.Mrr)
class Mrr(RankMean):
    """Mean of 1 / rank, with ranks in the whole catalogue."""

    name = "mrr"

    def __init__(self, config: pb.Mrr):
        super().__init__()

    def gain(self, ranks: Tensor) -> Tensor:
        return 1 / ranks
