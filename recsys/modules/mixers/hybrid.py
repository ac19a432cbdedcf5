"""`HybridMixer`: several mixers in sequence."""

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import declared_mixer
from recsys.config.registry import register
from recsys.modules.cache import CachingMixer, Encoded, MixerCache, StageSpec, caches
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout


@register(pb.HybridMixer)
class HybridMixer(Mixer, CachingMixer):
    """Applies mixers in sequence; a truncation in a mixer also holds for all mixers after it.

    Args:
        config: the resolved message.
        embedding_dim: E.

    Raises:
        ValueError: there is no mixer, or a mixture is among them.
    """

    def __init__(self, config: pb.HybridMixer, *, embedding_dim: int):
        super().__init__()
        if not config.mixers:
            raise ValueError("mixers: none is given; give at least one")
        chosen = [registry.pick(mixer) for mixer in config.mixers]
        if any(isinstance(mixer.config, pb.MixtureMixer) for mixer in chosen):
            raise ValueError(
                "mixers: a mixture takes several sequences and returns only targets; use it alone"
            )
        self.mixers = nn.ModuleList(mixer.cls(mixer.config, embedding_dim=embedding_dim) for mixer in chosen)

    @classmethod
    def kernels(
        cls, config: pb.HybridMixer, path: str, model: pb.Model, device: str
    ) -> Iterator[AttentionUse]:
        """Yields the attention ops of each mixer."""
        for index, mixer in enumerate(config.mixers):
            declared = declared_mixer(mixer, f"{path}.mixers[{index}]", model)
            if declared is not None:
                chosen = registry.lookup(type(declared.config))
                yield from chosen.kernels(declared.config, declared.path, model, device)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes tokens [T, E]; truncations drop history tokens, never contextual tokens or targets."""
        for mixer in self.mixers:
            sequence = mixer(sequence)
        return sequence

    @property
    def keeps_cache(self) -> bool:
        """Whether all mixers can score with a cache."""
        return all(map(caches, self.mixers))

    @property
    def target_group_size(self) -> int:
        """The number of consecutive targets that can only be scored together, for the groups of any mixer."""
        return math.lcm(*(mixer.target_group_size for mixer in self.mixers))

    def encode(
        self, sequence: JaggedSequence, cache: MixerCache | None = None, *, mixes: bool = False
    ) -> Encoded:
        """Computes the caches of all mixers, each of the mixed tokens of the mixer before it.

        Raises:
            NotExtendableError: a mixer would change the output of old tokens, which the next mixer reads.
        """
        parts, stacks = self._split(cache), []
        for number, (mixer, part) in enumerate(zip(self.mixers, parts, strict=True)):
            is_read = mixes or number + 1 < len(self.mixers)
            encoded = mixer.encode(sequence, part, mixes=is_read)
            stacks += encoded.cache.stacks
            sequence = encoded.sequence
        return Encoded(MixerCache(tuple(stacks)), sequence)

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets [N, E] as `forward` mixes them after the tokens of the cache."""
        for mixer, part in zip(self.mixers, self._split(cache), strict=True):
            sequence = mixer.score(sequence, part)
        return sequence

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks all mixers, each of which but the last is read by the next one."""
        for number, mixer in enumerate(self.mixers):
            mixer.require_extendable(num_contextual, mixes=mixes or number + 1 < len(self.mixers))

    def cache_stages(self) -> list[StageSpec]:
        """Describes the stages of all mixers' caches, which a truncation shortens from its mixer on."""
        stages, first, tail_len = [], 0, None
        for place, mixer in enumerate(self.mixers):
            is_last = place + 1 == len(self.mixers)
            for stage in mixer.cache_stages():
                number = first + stage.stack
                name = stage.name.replace(f"stack_{stage.stack}_", f"stack_{number}_")
                tail_len = min((n for n in (tail_len, stage.tail_len) if n is not None), default=None)
                slides = stage.slides and is_last
                stages.append(replace(stage, name=name, stack=number, tail_len=tail_len, slides=slides))
            first = stages[-1].stack + 1
        return stages

    def _split(self, cache: MixerCache | None) -> list[MixerCache | None]:
        """Returns the part of the cache that belongs to each mixer."""
        if cache is None:
            return [None] * len(self.mixers)
        stacks = iter(cache.stacks)
        counts = [len({stage.stack for stage in mixer.cache_stages()}) for mixer in self.mixers]
        return [MixerCache(tuple(next(stacks) for _ in range(count))) for count in counts]

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        total = 0
        for mixer in self.mixers:
            total += mixer.flops(layout)
            for rule in mixer.rules or ():
                layout = rule.truncate_layout(layout)
        return total
