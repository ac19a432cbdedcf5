"""The parts of mixture-of-experts heads: experts, and the gates that weigh them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.mlp import build_mlp


class Experts(nn.ModuleList):
    """Applies K networks SiLU(MLP(x)) to one input.

    Args:
        config: layers of each expert.
        in_dim: width of the input.
        out_dim: D, width of each output.
        count: K, number of experts.
    """

    def __init__(self, config: pb.Mlp, in_dim: int, out_dim: int, count: int):
        super().__init__(nn.Sequential(build_mlp(config, in_dim, out_dim), nn.SiLU()) for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Maps [N, in_dim] to a list of K outputs [N, D]."""
        return [expert(x) for expert in self]


class Gate(nn.Module):
    """Weighs experts by a softmax over scores that it computes from its input.

    Args:
        config: layers before the scores.
        in_dim: width of the input.
        count: K, number of experts.
    """

    def __init__(self, config: pb.Mlp, in_dim: int, count: int):
        super().__init__()
        self.scores = build_mlp(config, in_dim, count)

    def forward(self, x: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """Maps [N, in_dim] and K outputs [N, D] to [N, D], a convex combination of the experts."""
        weights = torch.softmax(self.scores(x), 1)
        return torch.bmm(weights[:, None], torch.stack(list(experts), 1)).squeeze(1)
