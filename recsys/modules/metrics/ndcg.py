"""`Ndcg`: the gain of a target among the k best items, discounted by the logarithm of its rank."""

import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import RankMean


@register(pb.Ndcg)
class Ndcg(RankMean):
    """NDCG@k with one relevant item: mean of 1 / log2(1 + rank), 0 for ranks above k."""

    def __init__(self, config: pb.Ndcg):
        super().__init__()
        if config.k < 1:
            raise ValueError(f"k: {config.k} is given; a list has at least 1 item")
        self.k = config.k
        self.name = f"ndcg@{config.k}"

    def gain(self, ranks: Tensor) -> Tensor:
        return torch.where(ranks <= self.k, 1 / torch.log2(1 + ranks), 0)
