"""`MixtureMixer`: a stack for each channel of the history (mixture of transducers)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.cache import OWN, Memory, MixerCache
from recsys.modules.flops import linear_flops
from recsys.modules.mixers import cached
from recsys.modules.mixers.batched_layers import parts_of
from recsys.modules.mixers.hstu import HstuMixer, may_mix_as_one, mix_as_one
from recsys.modules.sequence import JaggedSequence, join
from recsys.ops import SequenceLayout


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
        mixed = [mix_as_one(stacks, some) for stacks, some in self._in_step(parts)]
        return self._fuse(mixed, parts[0].take(parts[0].layout.targets_only()))

    @property
    def target_group_size(self) -> int:
        """Neighbouring targets that are scored together or not at all, by the groups of all stacks."""
        return math.lcm(*(stack.target_group_size for stack in self.stacks))

    def prefill(self, sequence: JaggedSequence, memory: Memory = OWN) -> MixerCache:
        """What targets will look at of the channels' contextual and history tokens; see `mixers.cached`."""
        return MixerCache(
            tuple(
                cached.prefill(stacks, _as_one(some), memory)
                for stacks, some in self._in_step(sequence.split())
            )
        )

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """What `forward` makes of the targets alone, once for each channel and joined, behind the tokens of
        the cache.
        """
        parts = sequence.split()
        groups = zip(self._in_step(parts), cache.stacks, strict=True)
        mixed = [parts_of(cached.score(stacks, _as_one(some), stages)) for (stacks, some), stages in groups]
        return self._fuse(mixed, parts[0])

    def extend(self, sequence: JaggedSequence, cache: MixerCache) -> MixerCache:
        """The cache of channels that have grown by these tokens.

        Raises:
            ValueError: it would be another one than that of `prefill`; see `cached.require_extendable`.
        """
        groups = zip(self._in_step(sequence.split()), cache.stacks, strict=True)
        return MixerCache(
            tuple(cached.extend(stacks, _as_one(some), stages) for (stacks, some), stages in groups)
        )

    def flops(self, layout: SequenceLayout) -> int:
        """FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        stacks = zip(self.stacks, layout.parts, strict=True)
        return sum(stack.flops(part) for stack, part in stacks) + linear_flops(
            self.fuse, layout.parts[0].total_targets
        )

    def _in_step(self, parts: Sequence[JaggedSequence]) -> list[tuple[list[HstuMixer], list[JaggedSequence]]]:
        """Stacks that run in step, with their channels."""
        return [
            ([self.stacks[number] for number in members], [parts[number] for number in members])
            for members in self.together
        ]

    def _fuse(self, mixed: Sequence[Sequence[JaggedSequence]], targets: JaggedSequence) -> JaggedSequence:
        """The `targets` with what the channels, in the order of `_in_step`, made of them."""
        found: dict[int, Tensor] = {}
        for members, sequences in zip(self.together, mixed, strict=True):
            found |= {number: one.targets() for number, one in zip(members, sequences, strict=True)}
        joined = torch.cat([found[number] for number in range(len(found))], dim=1)
        return targets.with_values(self.fuse(joined).to(joined.dtype))


def _as_one(sequences: Sequence[JaggedSequence]) -> JaggedSequence:
    return join(sequences) if len(sequences) > 1 else sequences[0]


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
