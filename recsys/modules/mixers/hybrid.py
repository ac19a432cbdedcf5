"""`HybridMixer`: several mixers in sequence."""

from collections.abc import Iterator

from torch import nn

from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import declared_mixer
from recsys.config.registry import register
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout


@register(pb.HybridMixer)
class HybridMixer(Mixer):
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

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        total = 0
        for mixer in self.mixers:
            total += mixer.flops(layout)
            for rule in mixer.rules or ():
                layout = rule.truncate_layout(layout)
        return total
