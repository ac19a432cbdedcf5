"""Progressive layered extraction: each task has its own experts in addition to the shared ones.

Source: Tang et al., "Progressive Layered Extraction (PLE)", RecSys 2020.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.heads.base import PairInput
from recsys.modules.heads.experts import Experts, Gate
from recsys.modules.mlp import build_mlp


class Streams(NamedTuple):
    """The vectors that pass from level to level: [N, width] for each task, and [N, width] for all tasks."""

    tasks: list[Tensor]
    shared: Tensor


@register(pb.PleHead)
class PleHead(nn.Module):
    """Applies several levels of experts, then a tower for each task.

    Args:
        config: experts, gates and towers.
        embedding_dim: E, width of both vectors.
        num_outputs: number of logits of each task.
    """

    def __init__(self, config: pb.PleHead, *, embedding_dim: int, num_outputs: Sequence[int]):
        super().__init__()
        self.input = PairInput(config.input, embedding_dim)
        widths = [self.input.width] + [config.expert_dim] * (config.num_levels - 1)
        self.levels = nn.ModuleList(
            Extraction(config, width, tasks=len(num_outputs), last=level == config.num_levels)
            for level, width in enumerate(widths, 1)
        )
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
        streams = Streams([x] * len(self.towers), x)
        for level in self.levels:
            streams = level(streams)
        return torch.cat([tower(x) for tower, x in zip(self.towers, streams.tasks, strict=True)], 1)


class Extraction(nn.Module):
    """Applies one level: a task's gate weighs its own and the shared experts, the shared gate weighs all.

    Args:
        config: numbers of experts, and layers of experts and gates.
        in_dim: width of the incoming streams.
        tasks: number of tasks.
        last: whether this is the last level, whose shared stream is not read and therefore stays unchanged.
    """

    def __init__(self, config: pb.PleHead, in_dim: int, *, tasks: int, last: bool):
        super().__init__()
        per_task, shared = config.num_task_experts, config.num_shared_experts
        self.own = nn.ModuleList(
            Experts(config.expert, in_dim, config.expert_dim, per_task) for _ in range(tasks)
        )
        self.shared = Experts(config.expert, in_dim, config.expert_dim, shared)
        self.gates = nn.ModuleList(Gate(config.gate, in_dim, per_task + shared) for _ in range(tasks))
        self.shared_gate = None if last else Gate(config.gate, in_dim, tasks * per_task + shared)

    def forward(self, streams: Streams) -> Streams:
        """Maps streams of [N, in_dim] to streams of [N, expert_dim]."""
        by_task = [experts(x) for experts, x in zip(self.own, streams.tasks, strict=True)]
        shared = self.shared(streams.shared)
        mixed = [
            gate(x, [*experts, *shared])
            for gate, x, experts in zip(self.gates, streams.tasks, by_task, strict=True)
        ]
        if self.shared_gate is None:
            return Streams(mixed, streams.shared)
        everything = [*(expert for experts in by_task for expert in experts), *shared]
        return Streams(mixed, self.shared_gate(streams.shared, everything))
