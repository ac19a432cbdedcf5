"""`HitRate`: the share of targets among the k best items."""

from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import RankMean


@register(pb.HitRate)
class HitRate(RankMean):
    """HR@k: share of targets with a rank of at most k."""

    def __init__(self, config: pb.HitRate):
        super().__init__()
        if config.k < 1:
            raise ValueError(f"k: {config.k} is given; a list has at least 1 item")
        self.k = config.k
        self.name = f"hit_rate@{config.k}"

    def gain(self, ranks: Tensor) -> Tensor:
        return (ranks <= self.k).double()
