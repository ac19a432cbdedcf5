"""`LinearMixer`: a stack of linear-attention layers, whose cost is linear in the length of a history."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.distance_channels import (
    POSITION_PERIODS,
    TIME_PERIODS,
    Clock,
    position_clock,
    time_clock,
)
from recsys.modules.linear_layer import LinearConfig, LinearLayer
from recsys.modules.mixers.base import AttentionUse, Mixer
from recsys.modules.mixers.batched_layers import to_compute_dtype
from recsys.modules.precision import COMPUTE_DTYPES
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout
from recsys.ops.linear_attention import OP as LINEAR_ATTENTION
from recsys.ops.linear_attention import LinearAttentionFacts

_FORM = {pb.LinearMixer.RETENTION: "retention", pb.LinearMixer.GATED: "gated", pb.LinearMixer.DELTA: "delta"}


@register(pb.LinearMixer)
class LinearMixer(Mixer):
    """Stacks layers of equal config, each with its own channels; all layers read the same clocks.

    Args:
        config: the resolved message (with `v_dim` and `feed_forward_dim`).
        embedding_dim: E.
    """

    def __init__(self, config: pb.LinearMixer, *, embedding_dim: int):
        super().__init__()
        channels = _channels(config)
        settings = LinearConfig(
            config.num_heads,
            config.qk_dim,
            config.v_dim,
            _FORM[config.form],
            config.feed_forward_dim,
            config.dropout,
            config.backend,
        )
        self.layers = nn.ModuleList(
            LinearLayer(embedding_dim, settings, channels) for _ in range(config.num_layers)
        )
        for name, periods in channels.items():
            self.register_buffer(f"{name}_periods", torch.tensor(periods), persistent=False)

    @classmethod
    def kernels(
        cls, config: pb.LinearMixer, path: str, model: pb.Model, device: str
    ) -> Iterator[AttentionUse]:
        """Yields `linear_attention` for the content of tokens and for the channels of time and position."""
        dtype = COMPUTE_DTYPES[model.precision]
        channels = list(_channels(config).values())
        for width in dict.fromkeys([config.qk_dim, *(2 * len(periods) for periods in channels)]):
            facts = LinearAttentionFacts(device, dtype, width, config.v_dim)
            yield AttentionUse(LINEAR_ATTENTION, path, config.backend, facts)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Mixes tokens [T, E]."""
        input_dtype = sequence.values.dtype
        sequence = to_compute_dtype(sequence)
        clocks, values = self._clocks(sequence), sequence.values
        for layer in self.layers:
            values = layer(values, sequence.layout, clocks)
        return sequence.with_values(values.to(input_dtype))

    def flops(self, layout: SequenceLayout) -> int:
        """Counts the FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        return sum(layer.flops(layout.total_len) for layer in self.layers)

    def _clocks(self, sequence: JaggedSequence) -> dict[str, Clock]:
        readers = {"time": time_clock, "position": position_clock}
        periods: dict[str, Tensor] = dict(self.named_buffers(recurse=False))
        return {
            name: read(sequence, periods[f"{name}_periods"])
            for name, read in readers.items()
            if f"{name}_periods" in periods
        }


def _channels(config: pb.LinearMixer) -> dict[str, tuple[int, ...]]:
    """Returns the clock periods of each channel, by name."""
    channels = {}
    if config.time_channel:
        channels["time"] = TIME_PERIODS
    if config.position_channel:
        channels["position"] = POSITION_PERIODS
    return channels
