"""`MixtureMixer`: a stack for each channel of the history (mixture of transducers)."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.flops import linear_flops
from recsys.modules.mixers.hstu import HstuMixer, may_mix_as_one, mix_as_one
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout
from recsys.registry import register


@register(pb.MixtureMixer)
class MixtureMixer(nn.Module):
    """Each stack mixes its channel; what they make of a candidate goes, side by side, through one linear
    layer.

    Stacks with equal messages have weights of their own but run in step, with one attention for all of them.

    Args:
        config: resolved; stacks in the order of the preprocessor's channels.
        embedding_dim: E.

    Raises:
        ValueError: no stack.
    """

    def __init__(self, config: pb.MixtureMixer, *, embedding_dim: int):
        super().__init__()
        if not config.stacks:
            raise ValueError("stacks: none is given; give one for each channel")
        self.stacks = nn.ModuleList(HstuMixer(one.hstu, embedding_dim=embedding_dim) for one in config.stacks)
        self.together = _equal([one.hstu for one in config.stacks])
        self.fuse = nn.Linear(len(self.stacks) * embedding_dim, embedding_dim)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixed targets, [N, E].

        Args:
            sequence: T tokens, the channels' sequences joined.

        Returns:
            A sequence of nothing but each row's targets.
        """
        parts = sequence.split()
        targets: dict[int, Tensor] = {}
        for members in self.together:
            stacks = [self.stacks[number] for number in members]
            mixed = mix_as_one(stacks, [parts[number] for number in members])
            targets |= {number: one.targets() for number, one in zip(members, mixed, strict=True)}
        joined = torch.cat([targets[number] for number in range(len(parts))], dim=1)
        layout, index = parts[0].layout.targets_only()
        times, next_times = (
            column.index_select(0, index) for column in (parts[0].timestamps, parts[0].next_timestamps)
        )
        return JaggedSequence(self.fuse(joined).to(joined.dtype), layout, times, next_times)

    def flops(self, layout: SequenceLayout) -> int:
        """FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        stacks = zip(self.stacks, layout.parts, strict=True)
        return sum(stack.flops(part) for stack, part in stacks) + linear_flops(
            self.fuse, layout.parts[0].total_targets
        )


def _equal(configs: list[pb.HstuMixer]) -> list[list[int]]:
    """Numbers of the stacks, those together that can run as one."""
    groups: list[list[int]] = []
    for number, config in enumerate(configs):
        mine = next(
            (group for group in groups if may_mix_as_one(config) and configs[group[0]] == config), None
        )
        if mine is None:
            groups.append([number])
        else:
            mine.append(number)
    return groups
