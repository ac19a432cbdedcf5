"""`MixtureMixer`: a separate stack for each channel of the history (mixture of transducers)."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.cache import CachingMixer, Encoded, MixerCache, StageSpec
from recsys.modules.flops import linear_flops
from recsys.modules.mixers import cached_stack
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.batched_layers import parts_of
from recsys.modules.mixers.hstu import HstuMixer, may_mix_as_one, mix_as_one
from recsys.modules.sequence import JaggedSequence, join
from recsys.ops import SequenceLayout


@register(pb.MixtureMixer)
class MixtureMixer(Mixer, CachingMixer):
    """Mixes each channel by its own stack; a linear layer combines the stacks' outputs for each candidate.

    Stacks with equal messages have separate weights but run as one batch, with one attention per layer for
    all.

    Args:
        config: the resolved message, with stacks in the order of the preprocessor's channels.
        embedding_dim: E.

    Raises:
        ValueError: there is no stack.
    """

    def __init__(self, config: pb.MixtureMixer, *, embedding_dim: int):
        super().__init__()
        if not config.stacks:
            raise ValueError("stacks: none is given; give one for each channel")
        hstu_configs = [stack.hstu for stack in config.stacks]
        self.stacks = nn.ModuleList(HstuMixer(hstu, embedding_dim=embedding_dim) for hstu in hstu_configs)
        self.together = _equal(hstu_configs)
        self.fuse = nn.Linear(len(self.stacks) * embedding_dim, embedding_dim)

    @classmethod
    def kernels(
        cls, config: pb.MixtureMixer, path: str, model: pb.Model, device: str
    ) -> Iterator[AttentionUse]:
        """Yields the attention ops of each stack."""
        for index, stack in enumerate(config.stacks):
            yield from HstuMixer.kernels(stack.hstu, f"{path}.stacks[{index}].hstu", model, device)

    def channel_stacks(self) -> Sequence[nn.Module]:
        """Returns the stacks in the order of the channels."""
        return list(self.stacks)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes the channels and returns a sequence of each row's targets only, [N, E].

        Args:
            sequence: the joined sequences of the channels, T tokens.
        """
        parts = sequence.split()
        mixed = [mix_as_one(stacks, channels) for stacks, channels in self._batches(parts)]
        return self._fuse(mixed, parts[0].take(parts[0].layout.targets_only()))

    @property
    def target_group_size(self) -> int:
        """The number of consecutive targets that can only be scored together, for the groups of any stack."""
        return math.lcm(*(stack.target_group_size for stack in self.stacks))

    def encode(
        self, sequence: JaggedSequence, cache: MixerCache | None = None, *, mixes: bool = False
    ) -> Encoded:
        """Computes keys and values of the channels' contextual and history tokens; see `cached_stack`.

        Raises:
            ValueError: mixed tokens are asked for, but a mixture returns only targets.
        """
        if mixes:
            raise ValueError("a mixture returns only targets, so no mixer can follow it")
        batches = self._batches(sequence.split())
        stacks = [None] * len(batches) if cache is None else cache.stacks
        return Encoded(
            MixerCache(
                tuple(
                    cached_stack.encode(members, _as_one(channels), stages, mixes).stages
                    for (members, channels), stages in zip(batches, stacks, strict=True)
                )
            ),
            None,
        )

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets as `forward` mixes them after the tokens of the cache.

        `sequence` joins the targets' tokens of all channels.
        """
        parts = sequence.split()
        mixed = []
        for (stacks, channels), stages in zip(self._batches(parts), cache.stacks, strict=True):
            mixed.append(parts_of(cached_stack.score(stacks, _as_one(channels), stages)))
        return self._fuse(mixed, parts[0])

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks that new events leave cached keys and values unchanged; see `cached_stack`."""
        for stack in self.stacks:
            stack.require_extendable(num_contextual, mixes=mixes)

    def cache_stages(self) -> list[StageSpec]:
        """Describes the stages of the mixer's caches, stack by stack."""
        specs = []
        for number, members in enumerate(self.together):
            specs += cached_stack.stage_specs(number, members, self.stacks[members[0]])
        return specs

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        stacks = zip(self.stacks, layout.parts, strict=True)
        return sum(stack.flops(part) for stack, part in stacks) + linear_flops(
            self.fuse, layout.parts[0].total_targets
        )

    def _batches(self, parts: Sequence[JaggedSequence]) -> list[tuple[list[HstuMixer], list[JaggedSequence]]]:
        """Pairs the stacks that run as one batch with their channels."""
        return [
            ([self.stacks[number] for number in members], [parts[number] for number in members])
            for members in self.together
        ]

    def _fuse(self, mixed: Sequence[Sequence[JaggedSequence]], targets: JaggedSequence) -> JaggedSequence:
        """Gives `targets` the combined outputs of the channels, which come in the order of `_batches`."""
        by_channel: dict[int, Tensor] = {}
        for members, sequences in zip(self.together, mixed, strict=True):
            by_channel |= {
                number: output.targets() for number, output in zip(members, sequences, strict=True)
            }
        joined = torch.cat([by_channel[number] for number in range(len(by_channel))], dim=1)
        return targets.with_values(self.fuse(joined).to(joined.dtype))


def _as_one(sequences: Sequence[JaggedSequence]) -> JaggedSequence:
    return join(sequences) if len(sequences) > 1 else sequences[0]


def _equal(configs: list[pb.HstuMixer]) -> list[list[int]]:
    """Groups the indices of stacks that can run as one batch."""
    groups: list[list[int]] = []
    for number, config in enumerate(configs):
        group = next((g for g in groups if may_mix_as_one(config) and configs[g[0]] == config), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups
