"""Multi-gate mixture of experts: tasks share experts and weigh them differently (Ma et al., KDD 2018)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.heads.base import PairInput
from recsys.modules.heads.experts import Experts, Gate
from recsys.modules.mlp import build_mlp


@register(pb.MmoeHead)
class MmoeHead(nn.Module):
    """Computes the logits of task t as tower_t(sum over experts k of softmax(gate_t(x))[k] * expert_k(x)).

    Args:
        config: experts, gates and towers.
        embedding_dim: E, width of both vectors.
        num_outputs: number of logits of each task.
    """

    def __init__(self, config: pb.MmoeHead, *, embedding_dim: int, num_outputs: Sequence[int]):
        super().__init__()
        self.input = PairInput(config.input, embedding_dim)
        width, experts = self.input.width, config.num_experts
        self.experts = Experts(config.expert, width, config.expert_dim, experts)
        self.gates = nn.ModuleList(Gate(config.gate, width, experts) for _ in num_outputs)
        self.towers = nn.ModuleList(build_mlp(config.tower, config.expert_dim, n) for n in num_outputs)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Computes the logits of each candidate.

        Args:
            user: [N, E], target tokens as the mixer returns them.
            item: [N, E], the candidates' content before the mixer.

        Returns:
            [N, sum of num_outputs], task by task.
        """
        x = self.input(user, item)
        experts = self.experts(x)
        mixtures = [gate(x, experts) for gate in self.gates]
        return torch.cat([tower(mixed) for tower, mixed in zip(self.towers, mixtures, strict=True)], 1)
